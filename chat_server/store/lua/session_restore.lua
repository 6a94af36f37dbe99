-- Write a session again that the store lost, or of which it lost the last changes: as the owner of its answer knows it,
-- if that is newer than what is here, and it was not deleted. Its version is that of what was lost: so whoever knows
-- more of that can write it over this, and whoever knows the same has missed nothing.
-- ARGV: session id, ttl ms, empty ttl ms, replica, version that the owner knows, then four lists, each behind the number
-- of its values: fields of the session, ids and items in their order, what answers what (as in `replies`), fields of the
-- running response; its text.
register('session_restore', function(keys, args)
  local version = redis.call('HGET', keys[SESSION], 'version')
  if redis.call('EXISTS', keys[DELETED]) == 1 or tonumber(version or '-1') >= tonumber(args[5]) then return {'newer'} end
  redis.call('DEL', keys[ITEMS], keys[ORDER], keys[RESPONSE], keys[TEXT], keys[REPLIES])
  local at = 6
  local function each_pair(write)
    local last = at + tonumber(args[at])
    for i = at + 1, last, 2 do write(args[i], args[i + 1]) end
    at = last + 1
  end
  each_pair(function(field, value) redis.call('HSET', keys[SESSION], field, value) end)
  redis.call('HSET', keys[SESSION], 'version', args[5], 'bytes', 0)
  each_pair(function(id, json)
    redis.call('RPUSH', keys[ORDER], id)
    put_item(keys, id, json)
  end)
  each_pair(function(item_id, reply) redis.call('HSET', keys[REPLIES], item_id, reply) end)
  each_pair(function(field, value) redis.call('HSET', keys[RESPONSE], field, value) end)
  if args[at] ~= '' then redis.call('SET', keys[TEXT], args[at]) end
  touch(keys, args[2], args[3])
  return {'ok'}
end)

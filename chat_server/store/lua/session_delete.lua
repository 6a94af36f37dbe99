-- Delete a session, also if the store lost it or its last changes: it counts as the caller knows it then. Its version is
-- remembered for an hour: an owner that was away must not write it again. ARGV: session id, replica, the version that the
-- caller knows.
register('session_delete', function(keys, args)
  if is_behind(keys, args[3]) then redis.call('HSET', keys[SESSION], 'version', args[3]) end
  if redis.call('EXISTS', keys[SESSION]) == 0 then return {'gone'} end
  local message = change(keys, args[2], args[1], 'gone', '"deleted":true')
  local version = redis.call('HGET', keys[SESSION], 'version')
  redis.call('DEL', unpack(keys))
  redis.call('SET', keys[DELETED], version, 'PX', 3600000)
  return {'ok', message}
end, WHEN_FULL)

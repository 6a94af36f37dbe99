-- Put an item into the conversation, once. ARGV: session id, ttl ms, empty ttl ms, replica, most items, item id,
-- item JSON, previous item id ('' for the end, 'root' for the start), version that the caller knows, most bytes.
register('item_add', function(keys, args)
  local why_not = unfit(keys, args[9])
  if why_not then return {why_not} end
  local id, json, after = args[6], args[7], args[8]
  local there = redis.call('HGET', keys[ITEMS], id)
  if there == json then return {'duplicate', before_id(keys, id) or false} end
  if there then return {'conflict'} end
  local no_room = has_no_room(keys, json, args[5], args[10])
  if no_room then return {no_room} end
  local previous = nil
  if after == '' then
    previous = last_id(keys)
    redis.call('RPUSH', keys[ORDER], id)
  elseif after == 'root' then
    redis.call('LPUSH', keys[ORDER], id)
  else
    if redis.call('LINSERT', keys[ORDER], 'AFTER', after, id) <= 0 then return {'no_previous'} end
    previous = after
  end
  put_item(keys, id, json)
  local message = change(keys, args[4], args[1], 'item', '"previous":' .. quoted(previous) .. ',"item":' .. json)
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

local function in_making(keys, id)
  local held = redis.call('HMGET', keys[RESPONSE], 'item_id', 'q_item_id')
  return held[1] == id or held[2] == id
end

-- Put another version of an item in its place, if it is still as it was read. ARGV: session id, ttl ms, empty ttl ms,
-- replica, item id, JSON as it was read, new JSON, body of the message, version that the caller knows.
register('item_replace', function(keys, args)
  local id = args[5]
  local why_not = unfit(keys, args[9])
  if why_not then return {why_not} end
  if in_making(keys, id) then return {'busy'} end
  local there = redis.call('HGET', keys[ITEMS], id)
  if not there then return {'gone'} end
  if there ~= args[6] then return {'stale'} end
  put_item(keys, id, args[7])
  local message = change(keys, args[4], args[1], 'truncated', args[8])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

-- Take an item out. ARGV: session id, ttl ms, empty ttl ms, replica, item id, the item that it answers ('' for none),
-- the response that made it ('' for none), version that the caller knows.
register('item_delete', function(keys, args)
  local id = args[5]
  local why_not = unfit(keys, args[8])
  if why_not then return {why_not} end
  if in_making(keys, id) then return {'busy'} end
  if remove_item(keys, id) == 0 then return {'gone'} end
  local previous = before_id(keys, id)
  redis.call('LREM', keys[ORDER], 1, id)
  redis.call('HDEL', keys[REPLIES], id)
  if args[6] ~= '' then forget_reply(keys, args[6], id) end
  if args[7] ~= '' then redis.call('HDEL', keys[REPLIES], '>' .. args[7]) end
  local message = change(keys, args[4], args[1], 'deleted',
    '"previous":' .. quoted(previous) .. ',"item_id":' .. quoted(id))
  touch(keys, args[2], args[3])
  return {'ok', message}
end, WHEN_FULL)

-- The last items, oldest first, with the version at which they were read. ARGV: session id, how many (0: all).
register('items_last', function(keys, args)
  local version = redis.call('HGET', keys[SESSION], 'version')
  if not version then return {'gone'} end
  local start = tonumber(args[2]) > 0 and -tonumber(args[2]) or 0
  local ids = redis.call('LRANGE', keys[ORDER], start, -1)
  local previous = false
  if #ids > 0 then previous = before_id(keys, ids[1]) or false end
  return {'ok', version, previous, items_of(keys, ids)}
end)

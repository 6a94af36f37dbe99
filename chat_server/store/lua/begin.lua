-- Begin a response: it takes its place in the conversation, or the reply says what stands against it.
-- ARGV: session id, ttl ms, empty ttl ms, replica, most items, response id, item id, in reply to ('' for none), token,
-- item JSON (in progress), begun JSON.
-- The prompt is what stands before the answer's place; it comes with the reply.
register('begin', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 0 then return {'gone'} end
  local response_id, item_id, in_reply_to, token = args[6], args[7], args[8], args[9]
  local running = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'message')
  if running[1] == response_id and running[2] == token then
    -- Asked again, for the answer was lost: the answer's own item is the last but is no part of the prompt.
    local ids = redis.call('LRANGE', keys[ORDER], 0, redis.call('LPOS', keys[ORDER], item_id) - 1)
    if redis.call('LPOS', keys[ORDER], item_id) == 0 then ids = {} end
    return {'ok', running[3], redis.call('HMGET', keys[SESSION], 'engine', 'engine_epoch'), items_of(keys, ids)}
  end
  if left_by(keys, response_id) then return {'ended'} end  -- asked again so late that it is over
  if in_reply_to ~= '' then
    if redis.call('HEXISTS', keys[ITEMS], in_reply_to) == 0 then return {'no_item'} end
    local reply = redis.call('HGET', keys[REPLIES], in_reply_to)
    if reply then return {'duplicate', reply} end
  end
  if running[1] then return {'active', running[1]} end
  if redis.call('LLEN', keys[ORDER]) >= tonumber(args[5]) then return {'full'} end
  local ids = redis.call('LRANGE', keys[ORDER], 0, -1)
  local previous = ids[#ids]
  redis.call('RPUSH', keys[ORDER], item_id)
  redis.call('HSET', keys[ITEMS], item_id, args[10])
  redis.call('DEL', keys[TEXT])
  if in_reply_to ~= '' then redis.call('HSET', keys[REPLIES], in_reply_to, response_id .. ' ' .. item_id) end
  local message = change(keys, args[4], args[1], 'begin',
    '"previous":' .. quoted(previous) .. ',"token":' .. quoted(token) .. ',"begun":' .. args[11])
  redis.call('HSET', keys[RESPONSE], 'id', response_id, 'item_id', item_id, 'in_reply_to', in_reply_to,
    'token', token, 'replica', args[4], 'begun', args[11], 'message', message)
  touch(keys, args[2], args[3])
  return {'ok', message, redis.call('HMGET', keys[SESSION], 'engine', 'engine_epoch'), items_of(keys, ids)}
end)

-- Bind the session to an engine, if nobody else bound it meanwhile. ARGV: session id, engine and epoch that were read
-- ('' for none), engine and epoch to bind to. Returns the binding that holds now.
register('bind', function(keys, args)
  local bound = redis.call('HMGET', keys[SESSION], 'engine', 'engine_epoch', 'version')
  if not bound[3] then return {'gone'} end
  if (bound[1] or '') == args[2] and (bound[2] or '') == args[3] then
    redis.call('HSET', keys[SESSION], 'engine', args[4], 'engine_epoch', args[5])
    redis.call('HDEL', keys[SESSION], 'expected_tokens')
    return {'ok', args[4], args[5]}
  end
  return {'ok', bound[1] or '', bound[2] or ''}
end)

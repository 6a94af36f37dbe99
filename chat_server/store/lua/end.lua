-- The end of a response, in one step: item, response, text, binding's tokens and version.
-- ARGV: session id, ttl ms, empty ttl ms, replica, response id, token, item id, item JSON ('' if the place is given
-- up), in reply to ('' for none), tokens to expect in the engine's cache, body of the message.
register('finish', function(keys, args)
  local response_id, token, item_id = args[5], args[6], args[7]
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token')
  if held[1] ~= response_id or held[2] ~= token then
    -- Told twice, it answers as the first time.
    local ended = redis.call('HMGET', keys[SESSION], 'ended_token', 'ended_message')
    if ended[1] == token then return {'ok', ended[2]} end
    return {held[1] and 'refused' or 'missing'}
  end
  if args[8] == '' then
    redis.call('HDEL', keys[ITEMS], item_id)
    redis.call('LREM', keys[ORDER], -1, item_id)
    if args[9] ~= '' then redis.call('HDEL', keys[REPLIES], args[9]) end
  else
    redis.call('HSET', keys[ITEMS], item_id, args[8])
  end
  redis.call('DEL', keys[RESPONSE], keys[TEXT])
  local message = change(keys, args[4], args[1], 'end', args[11])
  redis.call('HSET', keys[SESSION], 'ended_token', token, 'ended_message', message, 'expected_tokens', args[10])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

-- Take a response over from an owner that is gone: whoever holds the token that was just read may set a new one.
-- ARGV: session id, replica, token that was read, new token.
register('take_over', function(keys, args)
  if redis.call('HGET', keys[RESPONSE], 'token') ~= args[3] then return {'refused'} end
  redis.call('HSET', keys[RESPONSE], 'token', args[4], 'replica', args[2])
  return {'ok'}
end)

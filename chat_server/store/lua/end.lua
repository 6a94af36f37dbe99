-- The end of a response, in one step: item, response, text, binding's tokens and version; the queued one starts.
-- ARGV: session id, ttl ms, empty ttl ms, replica, response id, token, item id, item JSON, in reply to ('' for none),
-- tokens to expect in the engine's cache, body of the message, '1' if the item stays (else its place is given up), the
-- cut of the wish to stop that the caller knows of ('' for none), the version that the caller knows.
-- It writes nothing while there is another wish to stop.
register('finish', function(keys, args)
  local replica, response_id, token, item_id = args[4], args[5], args[6], args[7]
  if is_behind(keys, args[14]) then return {'behind'} end
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'cancel')
  if held[1] ~= response_id or held[2] ~= token then
    -- Told twice, it answers as the first time.
    local ended = redis.call('HMGET', keys[SESSION], 'ended_token', 'ended_message')
    if ended[1] == token then return {'ok', ended[2]} end
    return {held[1] and 'refused' or 'missing'}
  end
  if held[3] and held[3] ~= args[13] then return {'cancelled', held[3]} end
  if args[12] ~= '1' then
    give_up(keys, response_id, item_id, args[9], args[8])
  else
    put_item(keys, item_id, args[8])
    redis.call('HSET', keys[REPLIES], '>' .. response_id, item_id)
  end
  local message = change(keys, replica, args[1], 'end', args[11] .. ',"next":' .. promote(keys, replica))
  redis.call('HSET', keys[SESSION], 'ended_token', token, 'ended_message', message, 'expected_tokens', args[10])
  touch(keys, args[2], args[3])
  return {'ok', message}
end, WHEN_FULL)

-- What a response left: the version at which it was read, the id before its item, the item, '1' if that is in the
-- conversation. ARGV: session id, response id.
register('answer', function(keys, args)
  local version = redis.call('HGET', keys[SESSION], 'version')
  if not version then return {'gone'} end
  local item, kept, id = left_by(keys, args[2])
  if not item then return {'ok', version, false, false, '0'} end
  return {'ok', version, kept and before_id(keys, id) or false, item, kept and '1' or '0'}
end)

-- Wish the running response stopped, with its text cut; a queued one is at its end at once.
-- ARGV: session id, ttl ms, empty ttl ms, replica, response id, cut, the version that the caller knows.
-- Returns the cut that counts, or the message.
register('cancel', function(keys, args)
  if is_behind(keys, args[7]) then return {'behind'} end
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'q_id')
  if held[1] == args[5] then return {'wished', wish(keys, args[1], args[4], args[6])} end
  if held[2] ~= args[5] then return {'none'} end
  local message = end_queued(keys, args[1], args[4])
  touch(keys, args[2], args[3])
  return {'ended', message}
end, WHEN_FULL)

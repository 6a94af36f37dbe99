-- The end of a response, in one step: item, response, text, binding's tokens and version.
-- ARGV: session id, ttl ms, empty ttl ms, replica, response id, token, item id, item JSON, in reply to ('' for none),
-- tokens to expect in the engine's cache, body of the message, '1' if the item stays (else its place is given up), the cut that is carried out ('' for none).
-- It writes nothing while there is a wish to stop that it does not carry out.
register('finish', function(keys, args)
  local response_id, token, item_id = args[5], args[6], args[7]
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'cancel')
  if held[1] ~= response_id or held[2] ~= token then
    -- Told twice, it answers as the first time.
    local ended = redis.call('HMGET', keys[SESSION], 'ended_token', 'ended_message')
    if ended[1] == token then return {'ok', ended[2]} end
    return {held[1] and 'refused' or 'missing'}
  end
  if held[3] and held[3] ~= args[13] then return {'cancelled', held[3]} end
  if args[12] ~= '1' then
    redis.call('LPUSH', keys[ENDED], args[8])
    redis.call('LTRIM', keys[ENDED], 0, MOST_ENDED - 1)
    redis.call('HDEL', keys[ITEMS], item_id)
    redis.call('LREM', keys[ORDER], -1, item_id)
    if args[9] ~= '' then redis.call('HDEL', keys[REPLIES], args[9]) end
  else
    redis.call('HSET', keys[ITEMS], item_id, args[8])
    redis.call('HSET', keys[REPLIES], '>' .. response_id, item_id)
  end
  redis.call('DEL', keys[RESPONSE], keys[TEXT])
  local message = change(keys, args[4], args[1], 'end', args[11])
  redis.call('HSET', keys[SESSION], 'ended_token', token, 'ended_message', message, 'expected_tokens', args[10])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

-- What a response left: the version at which it was read, the id before its item, the item, '1' if that is in the
-- conversation. ARGV: session id, response id.
register('answer', function(keys, args)
  local version = redis.call('HGET', keys[SESSION], 'version')
  if not version then return {'gone'} end
  local item, kept, id = left_by(keys, args[2])
  if not item then return {'ok', version, false, false, '0'} end
  return {'ok', version, kept and before_id(keys, id) or false, item, kept and '1' or '0'}
end)

-- Wish a running response stopped, with its text cut: the first wish counts. The wish stays whoever dies; the message
-- only hurries its owner. ARGV: session id, replica, response id, cut. Returns the cut that counts.
register('cancel', function(keys, args)
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'replica', 'cancel')
  if held[1] ~= args[3] then return {'none'} end
  local cut = held[3]
  if not cut then
    cut = args[4]
    redis.call('HSET', keys[RESPONSE], 'cancel', cut)
  end
  if held[2] ~= args[2] then
    redis.call('PUBLISH', 'chat:replica:' .. held[2] .. ':inbox',
      'cancel ' .. args[1] .. ' ' .. args[3] .. ' ' .. cut)
  end
  return {'ok', cut}
end)

-- Take a response over from an owner that is gone: whoever holds the token that was just read may set a new one.
-- ARGV: session id, replica, token that was read, new token. Returns the text that is stored, and the wish to stop.
register('take_over', function(keys, args)
  if redis.call('HGET', keys[RESPONSE], 'token') ~= args[3] then return {'refused'} end
  redis.call('HSET', keys[RESPONSE], 'token', args[4], 'replica', args[2])
  return {'ok', redis.call('GET', keys[TEXT]) or '', redis.call('HGET', keys[RESPONSE], 'cancel')}
end)

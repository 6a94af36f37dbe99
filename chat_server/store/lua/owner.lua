-- Who makes a response: the owner is whoever holds its token.

-- How many code points a text in UTF-8 has: bytes that continue one are not counted.
local function points(text)
  local _, count = string.gsub(text, '[^\128-\191]', '')
  return count
end

-- Tell that a response goes on elsewhere. `epoch` is JSON: what joins the chain of epochs, or 'null'.
local function moved(keys, replica, session_id, response_id, owner, token, epoch, reason)
  local message = change(keys, replica, session_id, 'moved', '"response":' .. quoted(response_id) .. ',"owner":' ..
    quoted(owner) .. ',"token":' .. quoted(token) .. ',"epoch":' .. epoch .. ',"reason":' .. quoted(reason))
  redis.call('HSET', keys[RESPONSE], 'message', message)
  return message
end

-- Take a response over from an owner that is gone: whoever holds the token that was just read may set a new one. Asked
-- again with the same new token, it answers as the first time.
-- ARGV: session id, ttl ms, empty ttl ms, replica, token that was read, new token, new epoch, reason.
-- Returns the message, the text that is stored, the wish to stop, how many attempts without new text this makes, the
-- binding and all items.
register('take_over', function(keys, args)
  local replica, token = args[4], args[6]
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'message', 'attempts', 'attempt_at', 'later', 'replica')
  local text = redis.call('GET', keys[TEXT]) or ''
  local message, attempts = held[3], held[4]
  if held[2] ~= token then
    if held[2] ~= args[5] then return {'refused'} end
    local length = points(text)
    -- One that was handed over broke nothing: only what ended with its owner, or by a fault, is an attempt.
    attempts = length > tonumber(held[5] or '0') and 1
      or math.max(tonumber(held[4] or '1') + (held[7] == '' and 0 or 1), 1)
    local epoch = '["' .. args[7] .. '",' .. length .. ']'
    redis.call('HSET', keys[RESPONSE], 'token', token, 'replica', replica, 'attempts', attempts,
      'attempt_at', length, 'later', held[6] and held[6] .. ',' .. epoch or epoch)
    message = moved(keys, replica, args[1], held[1], replica, token, epoch, args[8])
    touch(keys, args[2], args[3])
  end
  return {'ok', message, text, redis.call('HGET', keys[RESPONSE], 'cancel'), tonumber(attempts), binding(keys),
    conversation(keys)}
end)

-- Another attempt of the same owner, on another engine. ARGV: session id, ttl ms, empty ttl ms, replica, token, attempts
-- without new text so far, length of the text, reason, the version that the caller knows.
register('attempt', function(keys, args)
  if is_behind(keys, args[9]) then return {'behind'} end
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token')
  if held[2] ~= args[5] then return {'refused'} end
  redis.call('HSET', keys[RESPONSE], 'attempts', args[6], 'attempt_at', args[7])
  local message = moved(keys, args[4], args[1], held[1], args[4], args[5], 'null', args[8])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

-- Leave a response to whoever takes it. ARGV: session id, ttl ms, empty ttl ms, replica, token, new token (nobody's),
-- the version that the caller knows.
register('hand_over', function(keys, args)
  if is_behind(keys, args[7]) then return {'behind'} end
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'message')
  if held[2] == args[6] then return {'ok', held[3]} end
  if held[2] ~= args[5] then return {'refused'} end
  redis.call('HSET', keys[RESPONSE], 'token', args[6], 'replica', '')
  local message = moved(keys, args[4], args[1], held[1], '', args[6], 'null', '')
  touch(keys, args[2], args[3])
  return {'ok', message}
end, WHEN_FULL)

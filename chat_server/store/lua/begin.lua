-- Begin a response, or queue it behind the running one: it takes its place in the conversation either way. The reply says
-- what stands against it.
-- ARGV: session id, ttl ms, empty ttl ms, replica, most items, response id, item id, in reply to ('' for none), token,
-- item JSON (in progress), begun JSON, if another one runs ('reject', 'queue' or 'interrupt'), for 'interrupt' the one
-- that runs by what the caller knows and its cut (another one keeps its text), and for the case that this one is
-- cancelled while it is queued: its item, and the body of the message; last the version that the caller knows, and the
-- most bytes.
-- All items come with the reply of a response that begins; its prompt is what stands before its own.
register('begin', function(keys, args)
  local why_not = unfit(keys, args[17])
  if why_not then return {why_not} end
  local session_id, replica = args[1], args[4]
  local response_id, item_id, in_reply_to, token, mode = args[6], args[7], args[8], args[9], args[12]
  local running = redis.call('HMGET', keys[RESPONSE], 'id', 'token', 'message', 'cancel', 'q_id', 'q_message', 'replica',
    'in_reply_to')
  -- Asked again, for the answer was lost.
  if running[1] == response_id and running[2] == token and running[7] == replica then
    return {'ok', {running[3]}, binding(keys), conversation(keys)}
  end
  if running[5] == response_id then return {'queued', {running[6]}, '', ''} end
  if running[1] == response_id then return {'queued', {}, '', ''} end  -- it waited; now somebody makes it
  if left_by(keys, response_id) then return {'ended'} end  -- so late that it is over
  if in_reply_to ~= '' then
    if redis.call('HEXISTS', keys[ITEMS], in_reply_to) == 0 then return {'no_item'} end
    local reply = redis.call('HGET', keys[REPLIES], in_reply_to)
    -- One that is being stopped, and has said nothing, is about to leave nothing: then there is no answer.
    local stops = running[4] and running[8] == in_reply_to and redis.call('STRLEN', keys[TEXT]) == 0
    if reply then return {stops and 'stopping' or 'duplicate', reply} end
  end
  if running[1] and mode == 'reject' and not running[4] then return {'active', running[1]} end
  if running[5] and mode ~= 'interrupt' then return {'active', running[5]} end
  local no_room = has_no_room(keys, args[10], args[5], args[18])
  if no_room then return {no_room} end

  local messages, cut = {}, ''
  if running[1] and mode == 'interrupt' then
    cut = wish(keys, session_id, replica, running[1] == args[13] and args[14] or ALL)
  end
  if running[5] then messages[1] = end_queued(keys, session_id, replica) end
  local previous = last_id(keys)
  redis.call('RPUSH', keys[ORDER], item_id)
  put_item(keys, item_id, args[10])
  if in_reply_to ~= '' then redis.call('HSET', keys[REPLIES], in_reply_to, response_id .. ' ' .. item_id) end
  local message = change(keys, replica, session_id, 'begin', '"previous":' .. quoted(previous) .. ',"token":' ..
    quoted(token) .. ',"queued":' .. (running[1] and 'true' or 'false') .. ',"begun":' .. args[11])
  messages[#messages + 1] = message
  local fields = {response_id, item_id, in_reply_to, token, args[11], message, args[15], args[16]}
  for i = 1, #fields do
    if running[1] then
      redis.call('HSET', keys[RESPONSE], QUEUED[i], fields[i])
    elseif i <= 6 then
      redis.call('HSET', keys[RESPONSE], string.sub(QUEUED[i], 3), fields[i])
    end
  end
  if not running[1] then
    redis.call('HSET', keys[RESPONSE], 'replica', replica)
    redis.call('DEL', keys[TEXT])
  end
  touch(keys, args[2], args[3])
  if running[1] then return {'queued', messages, running[1], cut} end
  return {'ok', messages, binding(keys), conversation(keys)}
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

-- The response hash: the fields of the running response, and with `q_` those of the queued one.
local QUEUED = {'q_id', 'q_item_id', 'q_in_reply_to', 'q_token', 'q_begun', 'q_message', 'q_ended_item', 'q_end'}

local function conversation(keys)
  return items_of(keys, redis.call('LRANGE', keys[ORDER], 0, -1))
end

local function binding(keys)
  return redis.call('HMGET', keys[SESSION], 'engine', 'engine_epoch')
end

-- Cancel the queued response: nothing of it was made. Returns the message.
local function end_queued(keys, session_id, replica)
  local queued = redis.call('HMGET', keys[RESPONSE], unpack(QUEUED))
  redis.call('HDEL', keys[RESPONSE], unpack(QUEUED))
  give_up(keys, queued[1], queued[2], queued[3], queued[7])
  return change(keys, replica, session_id, 'end', queued[8])
end

-- Start the queued response, if there is one, in the place of the one that ended: its owner is who ended that, with the
-- token that was named when it was queued. Returns JSON that says so.
local function promote(keys, replica)
  local queued = redis.call('HMGET', keys[RESPONSE], unpack(QUEUED))
  redis.call('DEL', keys[RESPONSE], keys[TEXT])
  if not queued[1] then return 'null' end
  for i = 1, 6 do redis.call('HSET', keys[RESPONSE], string.sub(QUEUED[i], 3), queued[i]) end
  redis.call('HSET', keys[RESPONSE], 'replica', replica, 'attempts', 0)
  return '{"response":"' .. queued[1] .. '","token":"' .. queued[4] .. '","replica":"' .. replica .. '"}'
end

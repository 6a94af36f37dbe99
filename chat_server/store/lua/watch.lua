-- Listen to a session, and get its state, with nothing in between. ARGV: session id, ttl ms, empty ttl ms, replica, '1'
-- for the last messages too.
register('watch', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 0 then return {'gone'} end
  watch(keys, args[4])
  redis.call('HDEL', keys[SESSION], 'unwatched_since')
  touch(keys, args[2], args[3])
  local items = redis.call('HMGET', keys[RESPONSE], 'item_id', 'q_item_id')
  return {'ok', redis.call('HGETALL', keys[SESSION]), redis.call('LLEN', keys[ORDER]),
    redis.call('HGETALL', keys[RESPONSE]), redis.call('GET', keys[TEXT]) or '',
    items[1] and before_id(keys, items[1]) or false, items[2] and before_id(keys, items[2]) or false,
    args[5] == '1' and redis.call('LRANGE', keys[CHANGES], 0, -1) or {}}
end)

-- Stop listening. ARGV: session id, replica.
register('unwatch', function(keys, args)
  redis.call('ZREM', keys[WATCHERS], args[2])
  if redis.call('ZCARD', keys[WATCHERS]) == 0 and redis.call('EXISTS', keys[SESSION]) == 1 then
    redis.call('HSET', keys[SESSION], 'unwatched_since', string.format('%.0f', now_ms()))
  end
  return 'ok'
end, WHEN_FULL)

-- What is held of a session: its version ('-1' if it is gone), the bytes of the running response's text, and its id and
-- cut if somebody wants it stopped.
local function held(keys)
  local wished = redis.call('HMGET', keys[RESPONSE], 'id', 'cancel')
  return {redis.call('HGET', keys[SESSION], 'version') or '-1', redis.call('STRLEN', keys[TEXT]),
    wished[2] and wished[1] or false, wished[2]}
end
register('held', held)

-- Go on listening, which is use. ARGV: session id, ttl ms, empty ttl ms, replica. Returns what is held.
register('renew', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 1 then
    watch(keys, args[4])
    touch(keys, args[2], args[3])
  end
  return held(keys)
end)

-- For how many milliseconds nobody has listened; -1 if somebody does, or the session is gone. ARGV: session id.
register('unwatched', function(keys, args)
  forget_dead_watchers(keys)
  if redis.call('EXISTS', keys[SESSION]) == 0 or redis.call('ZCARD', keys[WATCHERS]) > 0 then return -1 end
  local since = redis.call('HGET', keys[SESSION], 'unwatched_since')
  if not since then
    since = string.format('%.0f', now_ms())
    redis.call('HSET', keys[SESSION], 'unwatched_since', since)
  end
  return now_ms() - tonumber(since)
end)

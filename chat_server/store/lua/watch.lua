-- Listen to a session, and get its state, with nothing in between. ARGV: session id, ttl ms, empty ttl ms, replica.
register('watch', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 0 then return {'gone'} end
  redis.call('ZADD', keys[WATCHERS], now_ms(), args[4])
  redis.call('HDEL', keys[SESSION], 'unwatched_since')
  touch(keys, args[2], args[3])
  local response = redis.call('HGETALL', keys[RESPONSE])
  local previous = false
  if #response > 0 then
    previous = before_id(keys, redis.call('HGET', keys[RESPONSE], 'item_id')) or false
  end
  return {'ok', redis.call('HGETALL', keys[SESSION]), redis.call('LLEN', keys[ORDER]), response,
    redis.call('GET', keys[TEXT]) or '', previous}
end)

-- Stop listening. ARGV: session id, replica.
register('unwatch', function(keys, args)
  redis.call('ZREM', keys[WATCHERS], args[2])
  if redis.call('ZCARD', keys[WATCHERS]) == 0 and redis.call('EXISTS', keys[SESSION]) == 1 then
    redis.call('HSET', keys[SESSION], 'unwatched_since', string.format('%.0f', now_ms()))
  end
  return 'ok'
end)

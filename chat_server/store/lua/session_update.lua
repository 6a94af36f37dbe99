-- Change settings or model, if nothing changed since they were read. ARGV: session id, ttl ms, empty ttl ms, replica,
-- version that was read, model, settings JSON, model as JSON.
register('session_update', function(keys, args)
  local why_not = unfit(keys, args[5])
  if why_not then return {why_not} end
  if redis.call('HGET', keys[SESSION], 'version') ~= args[5] then return {'stale'} end
  redis.call('HSET', keys[SESSION], 'model', args[6], 'settings', args[7])
  local message = change(keys, args[4], args[1], 'settings', '"model":' .. args[8] .. ',"settings":' .. args[7])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

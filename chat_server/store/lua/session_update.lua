-- Change settings or model. ARGV: session id, ttl ms, empty ttl ms, replica, model, settings JSON, model as JSON.
register('session_update', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 0 then return {'gone'} end
  redis.call('HSET', keys[SESSION], 'model', args[5], 'settings', args[6])
  local message = change(keys, args[4], args[1], 'settings', '"model":' .. args[7] .. ',"settings":' .. args[6])
  touch(keys, args[2], args[3])
  return {'ok', message}
end)

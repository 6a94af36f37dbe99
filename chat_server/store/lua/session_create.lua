-- A new session. ARGV: session id, ttl ms, empty ttl ms, tenant, user, model, settings JSON.
register('session_create', function(keys, args)
  if redis.call('EXISTS', keys[SESSION]) == 1 then return 'exists' end
  redis.call('HSET', keys[SESSION], 'tenant', args[4], 'user', args[5], 'model', args[6], 'settings', args[7],
    'created', string.format('%.0f', now_ms()), 'version', '0')
  bump(keys)
  touch(keys, args[2], args[3])
  return 'ok'
end)

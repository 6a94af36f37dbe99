-- Text of a running response: written at its place, so a retry can not double it, and passed on to who watches.
-- This runs for every few tokens of every answer: it compares the token, the length, and writes once.
-- ARGV: session id, replica, response id, token, epoch, byte offset, offset in code points, text.
-- The reply says so if somebody wants the response stopped, in case the message that said it was lost.
register('commit', function(keys, args)
  local held = redis.call('HMGET', keys[RESPONSE], 'token', 'cancel')
  if not held[1] then return {'missing'} end
  if held[1] ~= args[4] then return {'refused'} end
  local at = tonumber(args[6])
  local length = redis.call('STRLEN', keys[TEXT])
  if length < at then return {'short', length} end
  redis.call('SETRANGE', keys[TEXT], at, args[8])
  if length == 0 then redis.call('PEXPIRE', keys[TEXT], redis.call('PTTL', keys[RESPONSE])) end
  tell(keys, args[2], 'text ', args[1], ' ', args[3], ' ', args[5], ' ', args[7], '\n', args[8])
  return {held[2] and 'wished' or 'ok'}
end)

-- What the functions share. The files of this folder are joined to one library at load, in the order of their names;
-- `register` comes first.
--
-- KEYS of every function, all of one session:
--   1 session (hash)  2 items (hash id -> JSON)  3 order (list of ids)  4 response (hash)  5 text (string)
--   6 watchers (sorted set replica -> ms)
--   7 replies (hash item id -> "response id answer's item id"; ">" and a response's id -> its item's id)
--   8 ended (list of the last responses that left no item in the conversation: id, a space, the item that they had)
--   9 deleted (string: the last version of a session that was deleted; it must not come back)
--  10 changes (list of the last messages, for a minute: who missed some reads them here)
-- Item and settings JSON is opaque here: it is stored and passed on, never parsed.

local SESSION, ITEMS, ORDER, RESPONSE, TEXT, WATCHERS, REPLIES, ENDED, DELETED, CHANGES = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
-- How many responses without an item are remembered.
local MOST_ENDED = 30
-- How many messages are kept, and for how long: for those who missed some while the store was away.
local MOST_CHANGES = 20
local CHANGES_MS = 60000
-- For how long a watcher counts that does not renew itself.
local WATCH_MS = 60000
-- What ends something is done in a store that is full too: it makes room.
local WHEN_FULL = {'allow-oom'}
-- More code points than any text has: a cut that keeps all of it.
local ALL = '9007199254740992'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Replicas that died without a word are nobody to tell something to.
local function forget_dead_watchers(keys)
  redis.call('ZREMRANGEBYSCORE', keys[WATCHERS], '-inf', now_ms() - WATCH_MS)
end

-- A replica listens, from now on or still.
local function watch(keys, replica)
  forget_dead_watchers(keys)
  redis.call('ZADD', keys[WATCHERS], now_ms(), replica)
end

-- Slide the life of a session: all its keys together. Without items it is short.
local function touch(keys, ttl_ms, empty_ttl_ms)
  local ttl = redis.call('LLEN', keys[ORDER]) > 0 and ttl_ms or empty_ttl_ms
  for i = 1, ENDED do
    redis.call('PEXPIRE', keys[i], ttl)
  end
end

-- A new version, never one that was there before, not even after the store lost its last second.
local function bump(keys)
  local before = redis.call('HGET', keys[SESSION], 'version')
  local after = string.format('%.0f', math.max(tonumber(before) + 1, now_ms()))
  redis.call('HSET', keys[SESSION], 'version', after)
  return before, after
end

-- Whether the store lost changes that the caller knows of: its version is older, or the session is not here and nobody
-- deleted it. A write on top of that would hide it.
local function is_behind(keys, known)
  local version = redis.call('HGET', keys[SESSION], 'version')
  return tonumber(version or '-1') < tonumber(known) and (version or redis.call('EXISTS', keys[DELETED]) == 0)
end

-- Why nothing can be written to the session by who knows this version: 'behind', 'gone', or nil.
local function unfit(keys, known)
  if is_behind(keys, known) then return 'behind' end
  if redis.call('EXISTS', keys[SESSION]) == 0 then return 'gone' end
  return nil
end

-- Each turn reads the items whole, so their bytes are counted: `bytes` of the session.
local function put_item(keys, id, json)
  redis.call('HINCRBY', keys[SESSION], 'bytes', #json - redis.call('HSTRLEN', keys[ITEMS], id))
  redis.call('HSET', keys[ITEMS], id, json)
end

local function remove_item(keys, id)
  redis.call('HINCRBY', keys[SESSION], 'bytes', -redis.call('HSTRLEN', keys[ITEMS], id))
  return redis.call('HDEL', keys[ITEMS], id)
end

-- Why the conversation takes no item more of this size, or nil.
local function has_no_room(keys, json, most_items, most_bytes)
  if redis.call('LLEN', keys[ORDER]) >= tonumber(most_items) then return 'full' end
  local bytes = tonumber(redis.call('HGET', keys[SESSION], 'bytes') or '0')
  if bytes + #json > tonumber(most_bytes) then return 'too_large' end
  return nil
end

-- Pass a message (in parts, joined only if somebody hears it) to every other replica that watches the session.
local function tell(keys, replica, ...)
  local watchers = redis.call('ZRANGE', keys[WATCHERS], 0, -1)
  local message = nil
  for i = 1, #watchers do
    if watchers[i] ~= replica then
      message = message or table.concat({...})
      redis.call('PUBLISH', 'chat:replica:' .. watchers[i] .. ':inbox', message)
    end
  end
end

-- Tell a change of the session: `body` is the inside of a JSON object. Returns what was told; the caller applies the
-- same message to its own connections, so there is one way of telling.
local function change(keys, replica, session_id, kind, body)
  local before, after = bump(keys)
  local message = '{"kind":"' .. kind .. '","session":"' .. session_id .. '","before":' .. before ..
    ',"version":' .. after .. ',' .. body .. '}'
  tell(keys, replica, message)
  redis.call('RPUSH', keys[CHANGES], message)
  redis.call('LTRIM', keys[CHANGES], -MOST_CHANGES, -1)
  redis.call('PEXPIRE', keys[CHANGES], CHANGES_MS)
  return message
end

local function quoted(id)
  if id then return '"' .. id .. '"' end
  return 'null'
end

-- The id that stands before `id` in the order, or nil.
local function before_id(keys, id)
  local at = redis.call('LPOS', keys[ORDER], id)
  if at and at > 0 then return redis.call('LINDEX', keys[ORDER], at - 1) end
  return nil
end

-- The item that a response left, as JSON, and whether it is in the conversation; nil if we know nothing of it.
local function left_by(keys, response_id)
  local id = redis.call('HGET', keys[REPLIES], '>' .. response_id)
  local item = id and redis.call('HGET', keys[ITEMS], id)
  if item then return item, true, id end
  for _, ended in ipairs(redis.call('LRANGE', keys[ENDED], 0, -1)) do
    local id, item = string.match(ended, '^(%S+) (.*)$')
    if id == response_id then return item, false end
  end
  return nil
end

-- What the person saw of a response decides where it is cut: the first wish to stop it counts. It stays, whoever dies; the
-- message only hurries the owner. Returns the cut that counts.
local function wish(keys, session_id, replica, cut)
  local held = redis.call('HMGET', keys[RESPONSE], 'id', 'replica', 'cancel')
  if not held[3] then redis.call('HSET', keys[RESPONSE], 'cancel', cut) end
  local counts = held[3] or cut
  if held[2] ~= replica then
    redis.call('PUBLISH', 'chat:replica:' .. held[2] .. ':inbox',
      'cancel ' .. session_id .. ' ' .. held[1] .. ' ' .. counts)
  end
  return counts
end

-- An item is no longer answered by this one; perhaps it is by another.
local function forget_reply(keys, in_reply_to, item_id)
  local reply = redis.call('HGET', keys[REPLIES], in_reply_to)
  if reply and string.match(reply, ' (.*)$') == item_id then redis.call('HDEL', keys[REPLIES], in_reply_to) end
end

-- The place of a response that leaves nothing is given up; its outcome is remembered.
local function give_up(keys, response_id, item_id, in_reply_to, ended_item)
  redis.call('LPUSH', keys[ENDED], response_id .. ' ' .. ended_item)
  redis.call('LTRIM', keys[ENDED], 0, MOST_ENDED - 1)
  remove_item(keys, item_id)
  redis.call('LREM', keys[ORDER], -1, item_id)
  if in_reply_to ~= '' then forget_reply(keys, in_reply_to, item_id) end
end

local function last_id(keys)
  return redis.call('LINDEX', keys[ORDER], -1) or nil
end

-- The items of these ids, in pieces: Lua unpacks some thousand values at most.
local function items_of(keys, ids)
  local items = {}
  for first = 1, #ids, 1000 do
    local part = redis.call('HMGET', keys[ITEMS], unpack(ids, first, math.min(first + 999, #ids)))
    for i = 1, #part do items[#items + 1] = part[i] end
  end
  return items
end

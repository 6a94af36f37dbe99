-- What the functions share. The files of this folder are joined to one library at load; VERSION and register come first.
--
-- KEYS of every function, all of one session:
--   1 session (hash)  2 items (hash id -> JSON)  3 order (list of ids)  4 response (hash)  5 text (string)
--   6 watchers (sorted set replica -> ms)
--   7 replies (hash item id -> "response id answer's item id"; ">" and a response's id -> its item's id)
--   8 ended (list of the items of the last responses that left none in the conversation)
-- Item and settings JSON is opaque here: it is stored and passed on, never parsed.

local SESSION, ITEMS, ORDER, RESPONSE, TEXT, WATCHERS, REPLIES, ENDED = 1, 2, 3, 4, 5, 6, 7, 8
-- How many responses without an item are remembered.
local MOST_ENDED = 10

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Slide the life of a session: all its keys together. Without items it is short.
local function touch(keys, ttl_ms, empty_ttl_ms)
  local ttl = redis.call('LLEN', keys[ORDER]) > 0 and ttl_ms or empty_ttl_ms
  for i = 1, #keys do
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
    if string.find(ended, '"response_id":"' .. response_id .. '"', 1, true) then return ended, false end
  end
  return nil
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

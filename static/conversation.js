/**
 * What a client knows of one session: its items in their order, and the answer that is being made.
 *
 * Pure state. Server events go in through `apply`, changes come out through the `changed` callback. No socket, no
 * clock, no DOM: `realtime.js` feeds it, a page shows it.
 */

/**
 * @typedef {object} Usage
 * @property {number} input_tokens
 * @property {number} output_tokens
 * @property {{cached_tokens?: number}} [input_token_details]
 *
 * @typedef {object} Item
 * @property {string} id
 * @property {'user' | 'assistant' | 'system'} role
 * @property {'in_progress' | 'completed' | 'incomplete'} status
 * @property {string} text
 * @property {number} points  length of `text` in code points, the unit of offsets
 * @property {number} [unseen]  code points that the server has beyond `text`: they came after the person's Stop
 * @property {string} [responseId]  the answer whose item it is
 * @property {boolean} [pending]  written here, not yet acknowledged by the server
 * @property {string} [engine]  which engine answered
 * @property {Usage} [usage]
 * @property {{queue_ms?: number, ttft_ms?: number, total_ms?: number}} [timing]
 * @property {Outcome} [outcome]  why an answer did not complete; one that is cut afterwards has none
 *
 * @typedef {object} Answer  a response that runs or waits
 * @property {string} id
 * @property {string | null} itemId
 * @property {string | null} inReplyTo
 * @property {string} epoch
 * @property {'queued' | 'prefill' | 'thinking' | 'streaming' | 'waiting' | null} stage
 * @property {number | null} position  its place in the queue
 *
 * @typedef {object} Outcome  how an answer ended that did not complete
 * @property {string} status  `cancelled`, `incomplete` or `failed`
 * @property {string | null} reason  `client_cancelled`, `max_output_tokens`, ...
 * @property {string | null} code  of the error
 * @property {string | null} message  of the error, for people
 *
 * @typedef {'items' | 'item' | 'text' | 'answer' | 'session'} Change
 */

/** The number of Unicode code points of `text`. `.length` counts UTF-16 units and is wrong at every emoji. */
export function countPoints(text) {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

/** The first `points` code points of `text`. */
export function headOf(text, points) {
  let index = 0;
  for (; points > 0 && index < text.length; points -= 1) {
    index += text.codePointAt(index) > 0xffff ? 2 : 1;
  }
  return text.slice(0, index);
}

/**
 * The rule of offsets: `text = text[:offset] + delta`. Makes duplicates harmless and carries a cut or a restart.
 *
 * @param {Item} item
 * @returns {boolean} false if there is a gap: text before `offset` is missing, nothing was changed
 */
export function applyDelta(item, offset, delta) {
  if (offset > item.points) return false;
  if (offset < item.points) item.text = headOf(item.text, offset);
  item.text += delta;
  item.points = offset + countPoints(delta);
  return true;
}

/** A client-chosen id with 128 random bits, so that saying a thing twice makes it once. */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

const textOf = (/** @type {any} */ raw) =>
  (raw.content ?? []).map((/** @type {any} */ part) => part.text ?? part.transcript ?? '').join('');

/** @returns {Outcome | undefined} */
function outcomeOf(status, details) {
  if (status === 'completed') return undefined;
  const { code = null, message = null } = details?.error ?? {};
  return { status, reason: details?.reason ?? null, code, message };
}

export class Conversation {
  /** @type {Item[]} in the session's order; own unacknowledged ones last */
  items = [];
  /** @type {Record<string, any> | null} the session as the server last described it */
  session = null;
  /** @type {Answer | null} */
  answer = null;
  /** @type {Map<string, Outcome>} by the user's item: answers that ended without leaving text */
  outcomes = new Map();

  /** @type {Map<string, Item>} */
  #byId = new Map();
  /** The answer that was under way when the last connection ended, and does not run any more or not yet. @type {Answer | null} */
  #away = null;
  /** @type {{left: number, told: Set<string>} | null} the history as told so far */
  #replay = null;
  /** The answer that the person stopped, and how much of it is shown. @type {{responseId: string, points: number} | null} */
  #held = null;
  #changed;

  /** @param {(change: Change, subject?: Item) => void} changed */
  constructor(changed = () => {}) {
    this.#changed = changed;
  }

  /** @returns {Item | undefined} */
  item(id) {
    return this.#byId.get(id);
  }

  /** The user's last message, if nothing was answered to it and nothing is under way. @returns {Item | null} */
  get unanswered() {
    const last = this.items.findLast((item) => item.role !== 'system');
    return last?.role === 'user' && !last.pending && !this.answer ? last : null;
  }

  /** What is held of the answer under way, so that the next connection goes on from there. */
  get resumePoint() {
    const answer = this.answer ?? this.#away;
    if (!answer) return null;
    const offset = (answer.itemId && this.#byId.get(answer.itemId)?.points) || 0;
    return { responseId: answer.id, epoch: answer.epoch, offset };
  }

  /** Whether a new connection is still telling the history: there may be more items. */
  get replaying() {
    return this.#replay !== null;
  }

  /** @returns {Item | undefined} */
  answerOf(responseId) {
    return this.items.find((item) => item.responseId === responseId);
  }

  /** Show no more of an answer than its first `points` code points, whatever comes of it. */
  hold(responseId, points) {
    this.#held = { responseId, points };
    const item = this.answerOf(responseId);
    if (item && item.points > points) this.#setText(item, item.text);
  }

  /** Show again what comes. What was held back has to be told anew. */
  release() {
    this.#held = null;
  }

  /** Show a message at the end before the server has it. @returns {Item} */
  addPending(id, text) {
    /** @type {Item} */
    const item = { id, role: 'user', status: 'completed', text, points: countPoints(text), pending: true };
    this.#byId.set(id, item);
    this.items.push(item);
    this.#changed('items');
    return item;
  }

  /** Take an item out: one that was deleted, or one that the server will never get. */
  remove(id) {
    if (!this.#byId.delete(id)) return;
    this.items = this.items.filter((item) => item.id !== id);
    this.#changed('items');
  }

  /** Say how the answer to `id` ended when no text of it is left. */
  setOutcome(id, outcome) {
    this.outcomes.set(id, outcome);
    this.#changed('answer');
  }

  /** @returns {boolean} false if text is missing (a gap): the caller has to connect anew */
  apply(event) {
    switch (event.type) {
      case 'session.created':
        this.#begin(event);
        break;
      case 'session.updated':
        this.session = event.session;
        this.#changed('session');
        break;
      case 'conversation.item.added':
      case 'conversation.item.done':
      case 'conversation.item.retrieved':
      case 'response.output_item.added':
      case 'response.output_item.done':
        this.#tell(event);
        break;
      case 'conversation.item.deleted':
        this.remove(event.item_id);
        break;
      case 'conversation.item.truncated':
        this.#cut(event);
        break;
      case 'response.created':
        this.#answerBegins(event);
        break;
      case 'response.queued':
        this.#stage(event.response_id, 'queued', event.position);
        break;
      case 'heartbeat':
        this.#stage(event.response_id, event.state);
        break;
      case 'response.output_text.delta':
        return this.#delta(event);
      case 'response.output_text.done':
        this.#lastWord(event);
        break;
      case 'response.done':
        this.#answerEnds(event.response);
        break;
    }
    return true;
  }

  /** A connection begins. What it tells replaces what was held; until then that stays in view. */
  #begin(event) {
    const known = this.session?.id === event.session.id;
    if (!known) {
      this.items = this.items.filter((item) => item.pending);
      this.#byId = new Map(this.items.map((item) => [item.id, item]));
      this.outcomes.clear();
      this.#away = null;
    }
    this.session = event.session;
    const active = event.active_response;
    if (this.answer && this.answer.id !== active?.id) {
      this.#away = this.answer;
      this.answer = null;
    }
    // The item of an answer that goes on where we were is not told again.
    this.#replay = { left: event.item_count ?? 0, told: new Set(active ? [active.item_id] : []) };
    this.#changed('session');
    this.#changed('answer');
    this.#endReplay();
  }

  /** Once the whole history was told again, items that it did not tell are gone from the session. */
  #endReplay() {
    const replay = this.#replay;
    if (!replay || replay.told.size < replay.left) return;
    this.#replay = null;
    for (const item of this.items) {
      if (!item.pending && !replay.told.has(item.id)) this.remove(item.id);
    }
  }

  #tell(event) {
    const raw = event.item;
    if (event.type === 'conversation.item.added' || event.type === 'conversation.item.done') this.#replay?.told.add(raw.id);
    if (raw.type === 'message') this.#tellMessage(event, raw);
    this.#endReplay();
  }

  #tellMessage(event, raw) {
    const ends = event.type.endsWith('.done');
    let item = this.#byId.get(raw.id);
    const isNew = !item;
    if (!item) {
      item = { id: raw.id, role: raw.role, status: raw.status, text: '', points: 0 };
      this.#byId.set(raw.id, item);
    }
    const moved = this.#place(item, event.previous_item_id, isNew);
    item.pending = false;
    item.responseId = raw.response_id ?? event.response_id ?? item.responseId;
    item.status = raw.status ?? (ends ? 'completed' : item.status);
    const text = textOf(raw);
    // An item that begins is told without text; what was held of it stays until its deltas say otherwise.
    if (ends || text) this.#setText(item, text);
    for (const field of ['engine', 'usage', 'timing']) {
      if (raw[field] != null) item[field] = raw[field];
    }
    if (raw.status_details) item.outcome = outcomeOf(raw.status_details.type, raw.status_details);
    const answer = this.#under(event.response_id);
    if (answer) answer.itemId = item.id;
    this.#changed(isNew || moved ? 'items' : 'item', item);
  }

  /** @returns {boolean} whether the order changed */
  #place(item, previousId, isNew) {
    if (previousId === undefined && !isNew) return false;
    const from = isNew ? -1 : this.items.indexOf(item);
    const previous = previousId ? this.#byId.get(previousId) : undefined;
    if (from > 0 && this.items[from - 1] === previous) return false;
    if (from === 0 && previousId === null) return false;
    const rest = this.items.filter((other) => other !== item);
    const at = previous ? rest.indexOf(previous) + 1 : previousId === null ? 0 : this.#endOf(rest);
    rest.splice(at, 0, item);
    this.items = rest;
    return true;
  }

  /** The end of what the server has: own unsent messages come after it. */
  #endOf(items) {
    const pending = items.findIndex((item) => item.pending);
    return pending < 0 ? items.length : pending;
  }

  #setText(item, text) {
    const shown = this.#isHeld(item.responseId) ? headOf(text, this.#held.points) : text;
    item.unseen = shown === text ? 0 : countPoints(text) - countPoints(shown);
    if (item.text === shown) return;
    item.text = shown;
    item.points = countPoints(shown);
    this.#changed('text', item);
  }

  #isHeld(responseId) {
    return this.#held !== null && this.#held.responseId === responseId;
  }

  #cut(event) {
    const item = this.#byId.get(event.item_id);
    const end = event.text_end;
    if (!item || end == null || end >= item.points + (item.unseen ?? 0)) return;
    const unseen = Math.max(0, end - item.points);
    this.#setText(item, headOf(item.text, end));
    item.unseen = unseen;
    item.status = 'incomplete';
    this.#changed('item', item);
  }

  #answerBegins(event) {
    const { response } = event;
    const inReplyTo = event.in_reply_to ?? response.in_reply_to ?? null;
    if (inReplyTo) this.outcomes.delete(inReplyTo);
    // `duplicate` answers a repeated question whose answer has ended: nothing is under way.
    if (event.duplicate || (response.status && response.status !== 'in_progress')) {
      if (this.answer?.id === response.id) this.answer = null;
    } else if (this.#running(response.id)) {
      this.answer.inReplyTo ??= inReplyTo;
    } else {
      this.answer = { id: response.id, itemId: null, inReplyTo, epoch: '', stage: null, position: null };
    }
    this.#changed('answer');
  }

  /** @returns {Answer | null} */
  #under(responseId) {
    return [this.answer, this.#away].find((answer) => answer && answer.id === responseId) ?? null;
  }

  /** The answer that runs, if it is this one; that may turn out only now. @returns {Answer | null} */
  #running(responseId) {
    if (!this.answer && this.#away && this.#away.id === responseId) {
      [this.answer, this.#away] = [this.#away, null];
      this.#changed('answer');
    }
    return this.answer?.id === responseId ? this.answer : null;
  }

  #stage(responseId, stage, position = null) {
    const answer = responseId ? this.#running(responseId) : this.answer;
    if (!answer || stage === 'idle') return;
    if (answer.stage === stage && answer.position === position) return;
    answer.stage = stage;
    answer.position = position;
    this.#changed('answer');
  }

  #delta(event) {
    const answer = this.#running(event.response_id);
    if (this.#isHeld(event.response_id)) return true;
    const item = this.#byId.get(event.item_id) ?? this.#open(event);
    if (!applyDelta(item, event.offset ?? item.points, event.delta)) return false;
    if (answer) {
      answer.itemId = item.id;
      answer.epoch = event.epoch ?? answer.epoch;
      if (answer.stage !== 'streaming') this.#stage(answer.id, 'streaming');
    }
    this.#changed('text', item);
    return true;
  }

  /** An answer's item that was not announced. @returns {Item} */
  #open({ item_id: id, response_id: responseId }) {
    /** @type {Item} */
    const item = { id, responseId, role: 'assistant', status: 'in_progress', text: '', points: 0 };
    this.#byId.set(id, item);
    this.#place(item, undefined, true);
    this.#changed('items', item);
    return item;
  }

  #lastWord(event) {
    const item = this.#byId.get(event.item_id);
    if (item) this.#setText(item, event.text);
  }

  #answerEnds(response) {
    const raw = (response.output ?? []).findLast((/** @type {any} */ one) => this.#byId.has(one.id));
    const item = raw && this.#byId.get(raw.id);
    const outcome = outcomeOf(response.status, response.status_details);
    const answer = this.#under(response.id);
    if (item) {
      item.engine = response.engine ?? item.engine;
      item.usage = response.usage ?? item.usage;
      item.timing = response.timing ?? item.timing;
      item.outcome = outcome;
      item.status = raw.status;
      this.#changed('item', item);
    }
    if (answer) {
      if (answer === this.answer) this.answer = null;
      else this.#away = null;
      const asked = answer.inReplyTo ?? this.items.findLast((one) => one.role === 'user')?.id;
      if (asked && !item && outcome) this.outcomes.set(asked, outcome);
    }
    this.#changed('answer');
  }
}

/**
 * The client of the realtime protocol: one session, what is asked of it, and what is known of it.
 *
 * Knows no DOM and depends on nothing outside this folder. Use:
 *
 *     const client = new RealtimeClient({ url: 'ws://127.0.0.1:8000/v1/realtime' });
 *     client.on('text', (item) => ...);       // an item's text changed; `item.text` is all of it
 *     client.on('connection', (link) => ...); // what to tell the person about the connection
 *     client.connect();
 *     client.send('Hello');
 *
 * Events: those of `Conversation` (`items`, `item`, `text`, `answer`, `session`), `connection` (a Link), and `fault`
 * (`{code, message, text}`: the server refused something; `text` is the message that was not taken, if it was one).
 */

import { after, backoff, Connection } from './connection.js';
import { Conversation, countPoints, newId } from './conversation.js';

/**
 * @typedef {object} Unsent  a message that the server has not begun to answer
 * @property {string} id  of the item
 * @property {string} text
 * @property {string} itemEvent  id of the event that creates the item
 * @property {string} askEvent  id of the event that asks for the answer
 * @property {boolean} sent  it was given to a socket and not refused since: the server may have it
 * @property {boolean} itemRefused
 * @property {number} tries
 *
 * @typedef {object} Stop  the wish that an answer ends where the person saw it; kept until it has, over all connections
 * @property {string | null} responseId  null: the server has not said yet that the answer began
 * @property {string | null} inReplyTo  the message that was asked about
 * @property {number} seen  what the person saw of the answer, in code points
 * @property {string} event  id of the events that ask for it
 * @property {boolean} cutting  the answer ended by itself, and the server was asked on this connection to cut it
 * @property {number} tries
 */

const MOST_RETRIES = 5;
/** How ids of events that stop an answer begin. What is refused of one that is over is nothing to tell. */
const STOP = 'evt_stop_';
/** An answer that was stopped before any of it was seen. */
const STOPPED = { status: 'cancelled', reason: null, code: null, message: null };

export class RealtimeClient {
  conversation = new Conversation((change, subject) => this.#emit(change, subject));

  #url;
  /** @type {string | null} */
  #sessionId;
  #model;
  #connection;
  /** @type {Map<string, Set<(subject: any) => void>>} */
  #listeners = new Map();
  #timers = { resend: 0, stop: 0 };
  /** @type {Unsent | null} */
  #unsent = null;
  /** The question that went with a message that was refused: its own refusal says nothing new. */
  #refusedAsk = '';
  /** @type {Stop | null} */
  #stop = null;

  /**
   * @param {object} options
   * @param {string | URL} options.url  of the endpoint, `ws:` or `wss:`
   * @param {string | null} [options.sessionId]  a session to go on with; none: a new one
   * @param {string | null} [options.model]
   * @param {() => string | null} [options.key]  gives the API key; asked before each connection
   */
  constructor({ url, sessionId = null, model = null, key = () => null }) {
    this.#url = new URL(url);
    this.#sessionId = sessionId;
    this.#model = model;
    this.#connection = new Connection({
      target: (scheme) => this.#target(scheme),
      key,
      hear: (event) => this.#hear(event),
      changed: (link) => this.#emit('connection', link),
    });
  }

  /** @returns {() => void} stops listening */
  on(type, listener) {
    const listeners = this.#listeners.get(type) ?? new Set();
    this.#listeners.set(type, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  get link() {
    return this.#connection.link;
  }

  get sessionId() {
    return this.#sessionId;
  }

  /** Whether a message waits for its answer, or an answer runs or is to stop: the next one has to wait. */
  get busy() {
    return this.#unsent !== null || this.#stop !== null || this.conversation.answer !== null;
  }

  /** Whether an answer is to stop, and the server has not said that it did and what is kept of it. */
  get stopping() {
    return this.#stop !== null;
  }

  /** Connect now, whatever the state: the first time, after a refusal, or because the person does not want to wait. */
  connect() {
    this.#connection.connect();
  }

  /** Leave for good: the answer that runs goes on at the server. */
  close() {
    this.#clear('resend');
    this.#clear('stop');
    this.#connection.close();
  }

  /** The page was shown again, or the network is back: look whether the connection still lives. */
  wake() {
    this.#connection.wake();
  }

  /** Say something and ask for the answer. It is sent when the connection is there, again if that breaks. */
  send(text) {
    if (this.busy) throw new Error('An answer is under way: wait for its end or stop it.');
    const id = newId('item_');
    this.conversation.addPending(id, text);
    this.#ask(id, text);
  }

  /** Ask (again) for the answer to a message that has none. */
  ask(itemId) {
    const item = this.conversation.item(itemId);
    if (!item || this.busy) return;
    this.conversation.outcomes.delete(itemId);
    this.#ask(itemId, item.text);
  }

  #ask(id, text) {
    const [itemEvent, askEvent] = [newId('evt_'), newId('evt_')];
    this.#unsent = { id, text, itemEvent, askEvent, sent: false, itemRefused: false, tries: 0 };
    this.#emit('answer');
    this.#deliver();
  }

  /** Stop the answer at what was seen of it. `seen` counts code points. Kept if there is no connection now. */
  stop(seen = null) {
    if (this.#stop || !this.busy) return;
    if (this.#unsent && !this.#unsent.sent) {
      this.#takeBack(STOPPED); // not asked yet: nothing is there to be stopped
      return;
    }
    const { answer } = this.conversation;
    const points = (answer?.itemId && this.conversation.item(answer.itemId)?.points) || 0;
    this.#stop = {
      responseId: answer?.id ?? null,
      inReplyTo: answer ? answer.inReplyTo : (this.#unsent?.id ?? null),
      seen: Math.min(seen ?? points, points),
      event: newId(STOP),
      cutting: false,
      tries: 0,
    };
    this.#cancel();
    this.#emit('answer');
  }

  #target(scheme) {
    const url = new URL(this.#url);
    if (scheme === 'http') url.protocol = url.protocol.replace('ws', 'http');
    url.searchParams.set('extensions', '1');
    url.searchParams.set('history', 'all');
    if (this.#sessionId) url.searchParams.set('session_id', this.#sessionId);
    if (this.#model) url.searchParams.set('model', this.#model);
    const held = this.conversation.resumePoint;
    if (scheme === 'ws' && held) {
      url.searchParams.set('response_id', held.responseId);
      url.searchParams.set('epoch', held.epoch);
      url.searchParams.set('offset', String(held.offset));
    }
    return url;
  }

  #hear(event) {
    if (event.type === 'session.created') this.#sessionId = event.session.id;
    if (!this.conversation.apply(event)) {
      this.#connection.comeBack(); // text is missing: the next connection goes on from what is there
      return;
    }
    if (event.type === 'session.created') this.#joined();
    if (event.type === 'response.created') this.#accepted(event);
    if (event.type === 'error') this.#refused(event.error);
    if (this.#stop) this.#watchStop(this.#stop, event);
  }

  /** A new connection: what was asked for on the one before may not have arrived. */
  #joined() {
    this.#cancel();
    this.#deliver();
  }

  // The message that waits for its answer.

  #isPending() {
    return this.#unsent !== null && this.conversation.item(this.#unsent.id)?.pending === true;
  }

  /** Both events are harmless if the server had them: the item has our id, and one item has one answer. */
  #deliver() {
    const unsent = this.#unsent;
    this.#clear('resend');
    if (!unsent || this.link.phase !== 'open') return;
    unsent.itemRefused = false;
    if (this.#isPending()) {
      const content = [{ type: 'input_text', text: unsent.text }];
      const item = { id: unsent.id, type: 'message', role: 'user', content };
      this.#connection.transmit({ type: 'conversation.item.create', event_id: unsent.itemEvent, item });
    }
    const ask = { type: 'response.create', event_id: unsent.askEvent, in_reply_to: unsent.id };
    if (this.#connection.transmit(ask)) unsent.sent = true;
  }

  #accepted(event) {
    const inReplyTo = event.in_reply_to ?? event.response.in_reply_to ?? null;
    if (this.#unsent && (!inReplyTo || inReplyTo === this.#unsent.id)) this.#unsent = null;
    if (this.#stop && !this.#stop.responseId && inReplyTo === this.#stop.inReplyTo) {
      this.#stop.responseId = event.response.id;
      this.#cancel();
    }
    this.#emit('answer');
  }

  /** The server did not take it, or was not asked: a message goes back to the person, a question that stands is ended. */
  #takeBack(outcome) {
    const unsent = this.#unsent;
    if (!unsent) return;
    const isPending = this.#isPending();
    this.#unsent = null;
    this.#refusedAsk = unsent.askEvent;
    this.#clear('resend');
    if (this.#stop?.inReplyTo === unsent.id) this.#stopped();
    if (isPending) {
      this.conversation.remove(unsent.id);
      this.#emit('fault', { code: outcome.code, message: outcome.message, text: unsent.text });
      this.#emit('answer');
    } else {
      this.conversation.setOutcome(unsent.id, outcome);
    }
  }

  // The wish to stop.

  /** Ask for the stop, if it is known of what. A second time is harmless: the first one counts. */
  #cancel() {
    const stop = this.#stop;
    this.#clear('stop');
    if (!stop?.responseId) return;
    stop.cutting = false;
    const { event: event_id, responseId: response_id, seen } = stop;
    this.conversation.hold(response_id, seen);
    this.#connection.transmit({ type: 'response.cancel', event_id, response_id, seen });
  }

  #watchStop(stop, event) {
    const { conversation } = this;
    if (event.type === 'response.done' && event.response.id === stop.responseId) {
      // While the history is told it is not known whether somebody went on from it; the answer to our cancel is behind it.
      if (!conversation.replaying) this.#ended(stop);
    } else if (stop.cutting && /item\.(truncated|deleted)$/.test(event.type)) {
      if (conversation.answerOf(stop.responseId)?.unseen) return; // it was another one, or cut elsewhere
      this.#stopped();
      if (!stop.seen && stop.inReplyTo) conversation.setOutcome(stop.inReplyTo, STOPPED);
    }
  }

  /** It is over. If that was not by our stop, the server has more of it than the person saw: that is taken off now. */
  #ended(stop) {
    const { conversation } = this;
    if (stop.cutting || conversation.answer?.id === stop.responseId) return; // what is waited for is on its way
    const item = conversation.answerOf(stop.responseId);
    if (!item?.unseen) {
      this.#stopped();
    } else if (item !== conversation.items.at(-1)) {
      this.#leaveWhole(stop, item); // somebody has gone on from it
    } else {
      stop.cutting = true;
      const what = { event_id: stop.event, item_id: item.id };
      if (stop.seen > 0) this.#connection.transmit({ type: 'conversation.item.truncate', ...what, text_end: stop.seen });
      else this.#connection.transmit({ type: 'conversation.item.delete', ...what });
    }
  }

  #leaveWhole(stop, item) {
    this.#stopped();
    this.#connection.transmit({ type: 'conversation.item.retrieve', event_id: stop.event, item_id: item.id });
  }

  #stopped() {
    this.#stop = null;
    this.#clear('stop');
    this.conversation.release();
    this.#emit('answer');
  }

  #stopRefused(stop, error) {
    if (error.code === 'response_cancel_not_active') {
      this.#ended(stop);
    } else if (error.retryable && stop.tries < MOST_RETRIES) {
      stop.tries += 1;
      this.#clear('stop');
      this.#timers.stop = after(error.retry_after_ms ?? backoff(stop.tries), () => this.#cancel());
    } else {
      const item = this.conversation.answerOf(stop.responseId);
      if (item?.unseen) this.#leaveWhole(stop, item);
      else this.#stopped();
      if (stop.cutting && !error.retryable) return; // somebody else has deleted it, or cut it shorter
      this.#emit('fault', { code: error.code, message: error.message, text: null });
    }
  }

  // What the server refuses.

  #refused(error) {
    const unsent = this.#unsent;
    const isAsk = error.event_id && error.event_id === (unsent?.askEvent ?? this.#refusedAsk);
    if (isAsk && (!unsent || unsent.itemRefused)) return; // follows from the refusal of its item, which was handled
    if (error.event_id?.startsWith(STOP)) {
      if (error.event_id === this.#stop?.event) this.#stopRefused(this.#stop, error);
    } else if (!unsent || !error.event_id || ![unsent.itemEvent, unsent.askEvent].includes(error.event_id)) {
      this.#emit('fault', { code: error.code, message: error.message, text: null });
    } else {
      this.#unsentRefused(unsent, error);
    }
  }

  #unsentRefused(unsent, error) {
    unsent.itemRefused = error.event_id === unsent.itemEvent;
    unsent.sent = false;
    if (this.#stop?.inReplyTo === unsent.id && !this.#stop.responseId) {
      this.#takeBack(STOPPED); // it was to be stopped, and has not begun
    } else if (error.retryable && unsent.tries < MOST_RETRIES) {
      unsent.tries += 1;
      this.#clear('resend');
      this.#timers.resend = after(error.retry_after_ms ?? backoff(unsent.tries), () => this.#deliver());
    } else {
      this.#takeBack({ status: 'failed', reason: null, code: error.code, message: error.message });
    }
  }

  #clear(name) {
    clearTimeout(this.#timers[name]);
    this.#timers[name] = 0;
  }

  #emit(type, subject) {
    for (const listener of this.#listeners.get(type) ?? []) listener(subject);
  }
}

export { Conversation, countPoints };

/**
 * The conversation in the page.
 *
 * Changes only mark what is out of date; once per frame it is brought up to date. So a burst of tokens costs one
 * rendering, and a tab that is not shown costs none.
 */

import { factsOf, outcomeText } from './status.js';
import { StreamingMarkdown } from './stream.js';

/** Rendering may take this share of the time: after a dear frame some are left out, and the page stays responsive. */
const RENDER_SHARE = 0.25;
const CHEAP_MS = 6;

/**
 * @typedef {object} Shown  one message in the page
 * @property {HTMLElement} element
 * @property {HTMLElement} body
 * @property {StreamingMarkdown | null} markdown
 * @property {string} text  what of the item is in the page
 * @property {boolean} writing  it was still being written then
 * @property {string} note  what its note says, as JSON
 */

export class ConversationView {
  #messages = /** @type {HTMLElement} */ (document.getElementById('messages'));
  #empty = /** @type {HTMLElement} */ (document.getElementById('empty'));
  #typing = /** @type {HTMLElement} */ (document.getElementById('typing'));
  #announcer = /** @type {HTMLElement} */ (document.getElementById('announcer'));
  /** @type {Map<string, Shown>} */
  #shown = new Map();
  /** @type {import('./realtime.js').RealtimeClient | null} */
  #client = null;
  /** Items whose text or state changed since the last frame. @type {Set<string>} */
  #dirty = new Set();
  #orderChanged = false;
  #scheduled = false;
  #notBefore = 0;
  #follower;
  #onRetry;

  /**
   * @param {import('./scroll.js').Follower} follower
   * @param {(itemId: string) => void} onRetry
   */
  constructor(follower, onRetry) {
    this.#follower = follower;
    this.#onRetry = onRetry;
    this.#messages.addEventListener('click', (event) => void this.#clicked(event));
  }

  /** Show another client's conversation from now on. */
  attach(client) {
    this.#client = client;
    this.#shown.clear();
    this.#dirty.clear();
    this.#messages.replaceChildren();
    client.on('items', () => this.#mark(null));
    client.on('item', (item) => this.#mark(item));
    client.on('text', (item) => this.#mark(item));
    client.on('answer', () => this.#mark(null));
    client.on('connection', () => this.#mark(null));
    this.#empty.hidden = false;
    this.#mark(null);
  }

  #mark(item) {
    if (item) this.#dirty.add(item.id);
    else this.#orderChanged = true;
    if (this.#scheduled) return;
    this.#scheduled = true;
    const wait = this.#notBefore - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(() => this.#render()), wait);
    else requestAnimationFrame(() => this.#render());
  }

  #render() {
    this.#scheduled = false;
    const began = performance.now();
    if (this.#orderChanged) this.#arrange();
    for (const id of this.#dirty) this.#refresh(id);
    this.#dirty.clear();
    this.#follower.settle();
    const cost = performance.now() - began;
    this.#notBefore = cost > CHEAP_MS ? began + cost / RENDER_SHARE : 0;
  }

  /** Bring the messages into the conversation's order, and what stands around them up to date. */
  #arrange() {
    this.#orderChanged = false;
    const { conversation, busy, stopping } = /** @type {import('./realtime.js').RealtimeClient} */ (this.#client);
    const items = conversation.items.filter((item) => item.role !== 'system');
    const wanted = new Set(items.map((item) => item.id));
    for (const [id, { element }] of this.#shown) {
      if (wanted.has(id)) continue;
      element.remove();
      this.#shown.delete(id);
    }
    /** @type {Element | null} */
    let next = this.#messages.firstElementChild;
    for (const item of items) {
      const element = (this.#shown.get(item.id) ?? this.#add(item)).element;
      if (element === next) next = next.nextElementSibling;
      else this.#messages.insertBefore(element, next);
      this.#dirty.add(item.id);
    }
    if (items.length === 0) this.#follower.rest();
    else if (!this.#empty.hidden) this.#follower.jump();
    this.#empty.hidden = items.length > 0;
    const running = conversation.answer?.itemId ? conversation.item(conversation.answer.itemId) : null;
    this.#typing.hidden = !busy || stopping || Boolean(running?.text);
  }

  /** @returns {Shown} */
  #add(item) {
    const element = make('article', `message ${item.role}`);
    const title = make('h2', 'sr-only', item.role === 'user' ? 'You said' : 'Answer');
    const isUser = item.role === 'user';
    const body = make('div', isUser ? 'bubble' : 'md');
    body.dir = 'auto';
    element.append(title, body);
    element.dataset.id = item.id;
    const markdown = isUser ? null : new StreamingMarkdown(body);
    const shown = { element, body, markdown, text: '', writing: false, note: 'null' };
    this.#shown.set(item.id, shown);
    return shown;
  }

  #refresh(id) {
    const client = /** @type {import('./realtime.js').RealtimeClient} */ (this.#client);
    const item = client.conversation.item(id);
    const shown = this.#shown.get(id);
    if (!item || !shown) return;
    const { element, body, markdown } = shown;
    const writing = item.role === 'assistant' && item.status === 'in_progress';
    if (shown.text !== item.text || shown.writing !== writing) {
      if (markdown) markdown.show(item.text, !writing);
      else body.textContent = item.text;
      shown.text = item.text;
    }
    element.hidden = !item.text && (writing || Boolean(item.unseen));
    element.classList.toggle('live', writing);
    element.classList.toggle('pending', item.pending === true);
    if (shown.writing && !writing) this.#announce(shown);
    shown.writing = writing;
    const facts = item.role === 'user' ? this.#userFacts(item) : writing ? null : factsOf(item);
    const key = JSON.stringify(facts);
    if (shown.note === key) return; // a button that was built anew would lose the focus
    shown.note = key;
    element.querySelector('.note')?.remove();
    if (facts) element.append(item.role === 'user' ? userNote(facts) : answerNote(facts));
  }

  /** A screen reader hears an answer once, when it is whole; tokens would drown it. */
  #announce(shown) {
    const spoken = /** @type {HTMLElement} */ (shown.body.cloneNode(true));
    for (const bar of spoken.querySelectorAll('.code-bar')) bar.remove();
    this.#announcer.textContent = spoken.textContent;
  }

  #userFacts(item) {
    const { conversation, busy, link } = /** @type {import('./realtime.js').RealtimeClient} */ (this.#client);
    if (item.pending) return link.phase === 'open' ? null : { text: 'Not sent yet', retry: false };
    if (busy || link.phase !== 'open' || conversation.unanswered !== item) return null;
    return { text: outcomeText(conversation.outcomes.get(item.id)), retry: true };
  }

  async #clicked(event) {
    const button = event.target.closest('button');
    const message = button?.closest('.message');
    if (!message) return;
    if (button.matches('.retry')) {
      this.#onRetry(message.dataset.id);
    } else if (button.matches('.copy-code')) {
      const done = await copy(button.closest('.code').querySelector('code').textContent);
      flash(button, done ? 'Copied' : 'Not allowed');
    } else if (button.matches('.copy-answer')) {
      const item = this.#client?.conversation.item(message.dataset.id);
      if (item && (await copy(item.text))) {
        button.classList.add('done');
        setTimeout(() => button.classList.remove('done'), 1500);
      }
    }
  }
}

function userNote({ text, retry }) {
  const note = make('p', 'note', text);
  if (!retry) return note;
  const again = /** @type {HTMLButtonElement} */ (make('button', 'quiet retry', 'Ask again'));
  again.type = 'button';
  note.append(again);
  return note;
}

function answerNote({ why, engine, cache, first }) {
  const note = make('p', 'note facts');
  const button = /** @type {HTMLButtonElement} */ (make('button', 'copy-answer'));
  button.type = 'button';
  button.title = 'Copy the answer';
  button.setAttribute('aria-label', 'Copy the answer');
  button.append(icon('M7.5 7.5h8v8h-8zM12.5 7.5v-3h-8v8h3'));
  const text = make('span', 'facts-text');
  note.append(button, text);
  if (why) text.append(make('span', 'why', why));
  if (engine) text.append(make('span', 'engine', engine));
  if (cache) {
    const span = make('span', 'cache', `${cache.cached} of ${cache.prompt} prompt tokens from the cache`);
    const meter = /** @type {HTMLMeterElement} */ (make('meter', ''));
    meter.value = cache.cached / cache.prompt;
    meter.setAttribute('aria-hidden', 'true'); // the words beside it say the same
    span.prepend(meter);
    text.append(span);
  }
  if (first) text.append(make('span', 'first', first));
  return note;
}

/** @returns {HTMLElement} */
export function make(tag, className, text = '') {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function icon(path) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 20 20');
  svg.setAttribute('aria-hidden', 'true');
  const shape = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  shape.setAttribute('d', path);
  svg.append(shape);
  return svg;
}

function flash(button, text) {
  const before = button.textContent;
  button.textContent = text;
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

/** @returns {Promise<boolean>} whether it is in the clipboard */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyTheOldWay(text); // over plain HTTP, other than on this machine, there is no navigator.clipboard
  }
}

function copyTheOldWay(text) {
  const area = document.createElement('textarea');
  area.value = text;
  area.className = 'sr-only';
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  return done;
}

/** What the person has to know or do beside the conversation: engines loading, a lost connection, a key to enter. */

import { isToken } from './connection.js';
import { durationText, readyText, troubleText } from './status.js';
import { make } from './view.js';

const KEY = 'chat.key';

/** Where the browser allows no storage: the key until the next reload. @type {string | null} */
let unstoredKey = null;

/** The API key of this tab, or null. */
export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? unstoredKey;
  } catch {
    return unstoredKey;
  }
}

function storeKey(key) {
  unstoredKey = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // storage is off or full: the key lives in memory
  }
}

export class Notices {
  #engines = byId('engines');
  #enginesTitle = byId('engines-title');
  #enginesList = byId('engines-list');
  #trouble = byId('trouble');
  #troubleText = byId('trouble-text');
  #action = byId('trouble-action');
  #close = byId('trouble-close');
  #keyForm = byId('key-form');
  #key = /** @type {HTMLInputElement} */ (byId('key'));
  #actions;
  /** @type {(() => void) | null} */
  #onAction = null;
  /** What the server refused, until the person has read it. @type {string} */
  #fault = '';
  /** @type {import('./connection.js').Link} */
  #link = { phase: 'idle' };
  /** When each engine was first seen to be loading, in ms. @type {Map<string, number>} */
  #loadingSince = new Map();

  /** @param {{connect: () => void, newChat: () => void}} actions */
  constructor(actions) {
    this.#actions = actions;
    this.#action.addEventListener('click', () => this.#onAction?.());
    this.#close.addEventListener('click', () => this.setFault(''));
    this.#keyForm.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#enterKey();
    });
    this.#key.addEventListener('input', () => this.#key.setCustomValidity(''));
  }

  /** @param {import('./connection.js').Link} link */
  setLink(link) {
    if (link.again) return; // what was told holds until this try has an outcome: no flicker, nothing read out twice
    this.#link = link;
    const asks = link.phase === 'refused' && link.status === 401;
    if (asks) {
      byId('key-text').textContent = storedKey() ? 'The server did not accept this API key.' : 'This server asks for an API key.';
      if (this.#keyForm.hidden) {
        this.#keyForm.hidden = false;
        this.#key.focus();
      }
    } else if (link.phase !== 'connecting') {
      this.#keyForm.hidden = true;
    }
    this.#showTrouble();
  }

  /** @param {string} fault */
  setFault(fault) {
    this.#fault = fault;
    this.#showTrouble();
  }

  /** @param {import('./readiness.js').Ready} ready */
  setReady(ready) {
    this.#engines.hidden = ready.ready;
    this.#showTrouble();
    if (ready.ready) return;
    const title = readyText(ready);
    // Only a change is written: the line is read out loud each time.
    if (this.#enginesTitle.textContent !== title) this.#enginesTitle.textContent = title;
    this.#enginesList.replaceChildren(...ready.engines.map((engine) => this.#engineLine(engine)));
  }

  #engineLine({ name, state, detail }) {
    const line = make('li', '');
    line.dataset.state = state;
    const since = this.#loadingSince.get(name) ?? Date.now();
    this.#loadingSince.set(name, since);
    const own = state === 'healthy' ? 'ready' : `not ready, ${durationText(Date.now() - since)} so far`;
    const text = make('span', '');
    text.append(make('b', '', name), ` ${detail || own}`);
    line.append(text);
    return line;
  }

  #showTrouble() {
    const { status, code } = this.#link;
    // The key's form and the list of engines say it better.
    const told = status === 401 || (code === 'engines_unavailable' && !this.#engines.hidden);
    const text = this.#fault || (told ? '' : troubleText(this.#link));
    this.#trouble.hidden = !text;
    if (this.#troubleText.textContent !== text) this.#troubleText.textContent = text;
    this.#close.hidden = !this.#fault;
    const [label, action] = this.#fault ? ['', null] : this.#remedy();
    this.#action.hidden = !action;
    this.#action.textContent = label;
    this.#onAction = action;
  }

  /** @returns {[string, (() => void) | null]} */
  #remedy() {
    const { phase, status } = this.#link;
    if (phase === 'refused' && status === 404) return ['New chat', this.#actions.newChat];
    if (phase === 'waiting' || phase === 'refused') return ['Try now', this.#actions.connect];
    return phase === 'closed' ? ['Connect again', this.#actions.connect] : ['', null];
  }

  #enterKey() {
    const key = this.#key.value.trim();
    if (!isToken(key)) {
      this.#key.setCustomValidity('An API key has only letters, digits and the signs - . _ ~ + and the like, no spaces.');
      this.#key.reportValidity();
      return;
    }
    storeKey(key);
    this.#key.value = '';
    this.#actions.connect();
  }
}

function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

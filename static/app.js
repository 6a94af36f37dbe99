/** Wires the page together: one client at a time, and the parts that show it. */

import { Composer } from './composer.js';
import { Notices, storedKey } from './notices.js';
import { Readiness } from './readiness.js';
import { RealtimeClient } from './realtime.js';
import { Follower } from './scroll.js';
import { durationText, statusText } from './status.js';
import { ConversationView, make } from './view.js';

const EXAMPLES = [
  'Explain in three sentences what a prefix cache does.',
  'Write a Python function that turns a list of dates into weeks.',
  'What should I look at when I compare two rented flats?',
  'Give me five ideas for a rainy Sunday, as a table.',
];

const LAST_SESSION = 'chat.lastSession';
/** An answer that takes longer than this to begin gets a clock beside the status. */
const PATIENCE_MS = 2000;

const byId = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @type {RealtimeClient} */
let client;
let busySince = 0;
let wasReady = true;

const follower = new Follower(byId('log'), byId('latest'));
const view = new ConversationView(follower, (itemId) => {
  client.ask(itemId);
  composer.focus(); // the button that was pressed goes away
});
const composer = new Composer({ send: say, stop: () => client.stop() });
const notices = new Notices({ connect: () => client.connect(), newChat });
const readiness = new Readiness(new URL('readyz', document.baseURI), (ready) => {
  notices.setReady(ready);
  if (ready.ready) becameReady();
  wasReady = ready.ready;
  byId('simulated').hidden = !ready.simulated;
  showStatus();
});

/** What was waited for may be there: connect, and ask again for an answer that no engine came for in time. */
function becameReady() {
  if (client.link.phase === 'waiting') client.wake();
  const { unanswered, outcomes } = client.conversation;
  if (!wasReady && unanswered && outcomes.get(unanswered.id)?.code === 'overloaded') client.ask(unanswered.id);
}

function endpoint() {
  const url = new URL('v1/realtime', document.baseURI);
  url.protocol = url.protocol.replace('http', 'ws');
  url.hash = '';
  return url;
}

/** The address of the page names the session, so that a reload or a bookmark finds it. */
function sessionInAddress() {
  return new URLSearchParams(location.hash.slice(1)).get('session');
}

/** Show a session; none: a new one, which the server makes. */
function open(sessionId) {
  client?.close();
  const mine = new RealtimeClient({ url: endpoint(), sessionId, key: storedKey });
  client = mine;
  const when = (/** @type {string} */ type, /** @type {(subject: any) => void} */ run) =>
    mine.on(type, (subject) => {
      if (mine === client) run(subject);
    });
  when('session', showSession);
  when('items', remember);
  when('answer', showStatus);
  when('connection', (link) => {
    notices.setLink(link);
    showStatus();
    if (link.phase === 'open' || link.status === 503) void readiness.ask();
  });
  when('fault', ({ message, text }) => {
    if (message) notices.setFault(message);
    if (text) composer.restore(text);
  });
  notices.setFault('');
  view.attach(mine);
  mine.connect();
}

function newChat() {
  if (client.conversation.items.length > 0 || client.link.phase !== 'open') {
    history.pushState(null, '', location.pathname + location.search);
    open(null);
  }
  composer.focus();
}

function say(text) {
  notices.setFault('');
  client.send(text);
  follower.jump();
}

function showSession() {
  const { session } = client.conversation;
  if (!session) return;
  const address = `#session=${encodeURIComponent(session.id)}`;
  if (location.hash !== address) history.replaceState(null, '', address);
  byId('model').textContent = session.model ?? '';
  byId('model').hidden = !session.model;
  offerLast();
}

function remember() {
  const { items, session } = client.conversation;
  const first = items.find((item) => item.role === 'user');
  document.title = first ? `${first.text.slice(0, 60).replace(/\s+/g, ' ')} · Chat` : 'Chat';
  if (session && items.some((item) => !item.pending)) store(LAST_SESSION, session.id);
}

/** Only the id of the last session is kept: what was said stays at the server. */
function offerLast() {
  const last = read(LAST_SESSION);
  byId('continue').hidden = !last || last === client.sessionId;
}

function showStatus() {
  const { busy, conversation } = client;
  composer.setBusy(busy);
  busySince = busy ? busySince || performance.now() : 0;
  const text = statusText(client, readiness.state);
  if (byId('status-text').textContent !== text) byId('status-text').textContent = text;
  byId('status').classList.toggle('busy', busy || client.link.phase === 'connecting');
  const { unanswered, outcomes } = conversation;
  if (unanswered && outcomes.get(unanswered.id)?.code === 'overloaded') void readiness.ask();
  showClock();
}

function showClock() {
  const waited = busySince ? performance.now() - busySince : 0;
  const stage = client.conversation.answer?.stage;
  const shown = waited > PATIENCE_MS && stage !== 'streaming';
  if (shown && (!stage || stage === 'queued')) void readiness.ask(); // is there an engine at all?
  byId('status-time').textContent = shown ? `, ${durationText(Math.floor(waited / 1000) * 1000)}` : '';
}

function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // storage is off or full: nothing that the person needs now is lost
  }
}

function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

function labelTheme() {
  const label = isDark() ? 'Light colours' : 'Dark colours';
  byId('theme').setAttribute('aria-label', label);
  byId('theme').title = label;
}

byId('theme').addEventListener('click', () => {
  const theme = isDark() ? 'light' : 'dark';
  document.documentElement.dataset.theme = theme;
  store('chat.theme', theme);
  labelTheme();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', labelTheme);
labelTheme();

for (const text of EXAMPLES) {
  const button = /** @type {HTMLButtonElement} */ (make('button', '', text));
  button.type = 'button';
  button.addEventListener('click', () => {
    if (!client.busy) say(text);
    composer.focus();
  });
  byId('examples').append(button);
}
byId('new-chat').addEventListener('click', newChat);
byId('new-chat').title = 'New chat';
byId('continue').addEventListener('click', () => {
  history.pushState(null, '', `#session=${encodeURIComponent(read(LAST_SESSION) ?? '')}`);
  open(sessionInAddress());
  composer.focus();
});

// Back, forward and an address changed by hand lead to another session.
addEventListener('popstate', () => {
  if (sessionInAddress() !== client.sessionId) open(sessionInAddress());
});
// What a browser does to connections of a page that sleeps it tells nobody: look when the page is back.
addEventListener('online', () => client.wake());
addEventListener('pageshow', (event) => {
  if (event.persisted) client.wake();
});
document.addEventListener('visibilitychange', () => {
  if (document.visibilityState === 'visible') client.wake();
});
setInterval(showClock, 1000);

open(sessionInAddress());
void readiness.ask();
if (matchMedia('(pointer: fine)').matches) composer.focus(); // on a phone the keyboard would cover the page

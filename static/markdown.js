/**
 * Markdown of a model -> DOM nodes that can do no harm.
 *
 * Two walls. The renderer makes text of what has no place in an answer: raw HTML is shown as it was written, an image
 * becomes a link (loading it would tell its host what the conversation was about). DOMPurify then lets through a short
 * list of tags and attributes and nothing else. The server's content security policy is the third wall.
 */

import { Lexer, Marked } from './vendor/marked-18.2.1.js';
import DOMPurify from './vendor/dompurify-3.5.0.js';

/** Tables have no other way to break a line. */
const LINE_BREAK = /^<br\s*\/?>$/i;

/** Attributes that a style sheet or a reader needs; `align` is how Markdown tables say it. */
const POLICY = {
  ALLOWED_TAGS: (
    'a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong ' +
    'table tbody td th thead tr ul'
  ).split(' '),
  ALLOWED_ATTR: ['align', 'class', 'href', 'start'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ['align', 'start'], // else their values would have to look like addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: /** @type {const} */ (true),
};

const escapeHtml = (/** @type {string} */ text) =>
  text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true, // models mean their line breaks
  renderer: {
    html(token) {
      const raw = token.raw.trim();
      if (LINE_BREAK.test(raw)) return raw;
      return token.block ? `<pre class="raw">${escapeHtml(raw)}</pre>` : escapeHtml(token.raw);
    },
    image({ href, text }) {
      return `<a href="${escapeHtml(href)}">${escapeHtml(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? '☑ ' : '☐ ';
    },
    heading({ tokens, depth }) {
      // The page's own headings come first: an answer's outline begins below them.
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
});

/** Our own purifier: its hooks do not meet those of another part of the page. */
const purifier = DOMPurify(window);

purifier.addHook('afterSanitizeAttributes', (node) => {
  const element = /** @type {Element} */ (node);
  if (element.tagName === 'A') {
    element.setAttribute('target', '_blank');
    element.setAttribute('rel', 'noopener noreferrer');
  } else if (element.tagName === 'PRE') {
    element.setAttribute('dir', 'ltr');
  } else if (/^(?:P|LI|H\d|BLOCKQUOTE|T[DH]|UL|OL)$/.test(element.tagName)) {
    element.setAttribute('dir', 'auto'); // an answer may go on in a script of the other direction
  }
});

/** @typedef {Record<string, {href: string, title: string}>} Links  what `[label]: url` lines defined */

/**
 * Text -> blocks, in order; their `raw` texts joined are the text again.
 *
 * @param {string} text
 * @param {Links} links  defined by earlier text
 */
export function blocksOf(text, links) {
  const lexer = new Lexer(marked.defaults);
  Object.assign(lexer.tokens.links, links);
  return lexer.lex(text);
}

/** Blocks -> nodes, ready to be put into the page. @returns {DocumentFragment} */
export function nodesOf(blocks) {
  const fragment = purifier.sanitize(marked.parser(blocks), POLICY);
  for (const table of fragment.querySelectorAll('table')) wrap(table, 'table-wrap');
  for (const pre of fragment.querySelectorAll('pre')) {
    if (pre.firstElementChild?.tagName === 'CODE') addCodeBar(pre);
  }
  return fragment;
}

/** A wide table scrolls in its own box, not the page. */
function wrap(element, className) {
  const box = document.createElement('div');
  box.className = className;
  box.tabIndex = 0; // what scrolls must be reachable by keyboard
  element.replaceWith(box);
  box.append(element);
  return box;
}

function addCodeBar(pre) {
  const language = /language-([\w+#.-]+)/.exec(pre.firstElementChild.className)?.[1] ?? '';
  const box = wrap(pre, 'code');
  box.removeAttribute('tabindex');
  pre.tabIndex = 0;
  const bar = document.createElement('div');
  bar.className = 'code-bar';
  const name = document.createElement('span');
  name.textContent = language;
  const copy = document.createElement('button');
  copy.type = 'button';
  copy.className = 'copy-code';
  copy.textContent = 'Copy';
  copy.setAttribute('aria-label', language ? `Copy ${language} code` : 'Copy code');
  bar.append(name, copy);
  box.prepend(bar);
}

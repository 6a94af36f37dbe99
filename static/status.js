/** Words for where things stand. Pure: state in, text out. */

/**
 * The quiet line below the message field.
 *
 * @param {import('./realtime.js').RealtimeClient} client
 * @param {import('./readiness.js').Ready | null} ready
 */
export function statusText(client, ready) {
  const { link, busy, stopping } = client;
  if (link.phase === 'connecting' && !link.again) return 'Connecting';
  if (link.phase !== 'open') {
    if (stopping) return 'Not connected: the answer is stopped as soon as the connection is there';
    if (client.conversation.answer) return 'Not connected: the answer goes on at the server';
    return busy ? 'Sent as soon as the connection is there' : 'Not connected';
  }
  if (stopping) return 'Stopping';
  return busy ? stageText(client.conversation.answer, ready) : '';
}

function stageText(answer, ready) {
  switch (answer?.stage) {
    case 'queued':
      if (ready && !ready.ready) return 'Waiting for the first engine';
      return answer.position ? `Waiting for a place on an engine: number ${answer.position}` : 'Waiting for a place on an engine';
    case 'prefill':
      return 'Reading the conversation';
    case 'thinking':
      return 'Thinking';
    case 'streaming':
      return 'Writing';
    case 'waiting':
      return 'Paused: the store of the conversations is away, it goes on by itself';
    default:
      return 'Waiting for the answer';
  }
}

/**
 * What an answer cost and who gave it.
 *
 * @param {import('./conversation.js').Item} item
 * @returns {{why: string, engine: string, cache: {cached: number, prompt: number} | null, first: string}}
 */
export function factsOf(item) {
  const prompt = item.usage?.input_tokens ?? 0;
  const cached = item.usage?.input_token_details?.cached_tokens;
  const ttft = item.timing?.ttft_ms;
  return {
    why: item.status === 'incomplete' ? whyText(item.outcome) : '',
    engine: item.engine ?? '',
    cache: prompt > 0 && cached != null ? { cached, prompt } : null,
    first: ttft == null ? '' : `first word after ${durationText(ttft)}`,
  };
}

/** Why an answer is not whole. @param {import('./conversation.js').Outcome | undefined} outcome */
function whyText(outcome) {
  if (!outcome || outcome.status === 'cancelled') return 'Stopped';
  const { status, reason, message } = outcome;
  if (reason === 'max_output_tokens') return 'Cut off: the answer is as long as one may be';
  if (reason === 'content_filter') return 'Cut off by a content filter';
  const what = status === 'failed' ? 'Broken off' : 'Cut off';
  return message ? `${what}: ${message}` : what;
}

/** @param {number} ms */
export function durationText(ms) {
  if (ms < 995) return `${Math.round(ms)} ms`;
  return ms < 9950 ? `${Number((ms / 1000).toFixed(1))} s` : `${Math.round(ms / 1000)} s`;
}

/** Why there is no answer below the last message. @param {import('./conversation.js').Outcome | undefined} outcome */
export function outcomeText(outcome) {
  if (!outcome) return 'This message has no answer.';
  const { status, reason, message } = outcome;
  if (status === 'cancelled') return 'Stopped before the answer began.';
  if (reason === 'max_output_tokens') return 'The answer reached its greatest length before its first word.';
  if (reason === 'content_filter') return 'A content filter held the answer back.';
  return message || 'The answer failed before it began.';
}

/** Why the server can not answer yet. @param {import('./readiness.js').Ready} ready */
export function readyText({ store, engines }) {
  if (store === 'down') return 'The store of the conversations is away. The server waits for it.';
  const loading = engines.some((engine) => engine.state === 'starting');
  const who = engines.length === 1 ? 'The engine is' : 'The engines are';
  const what = loading ? `${who} getting ready.` : 'No engine answers at the moment.';
  return `${what} You can write already: the answer comes as soon as one is there.`;
}

/** The connection's trouble in words, or '' if there is none to tell. */
export function troubleText(link) {
  if (link.phase === 'closed') return 'The server closed the connection.';
  if (link.phase === 'refused') return refusalText(link);
  if (link.phase !== 'waiting') return '';
  if (link.status === 429) return `${link.message ?? 'Too many connections of yours are open.'} Trying again by itself.`;
  if (link.status >= 500) return `${link.message ?? 'The server is too busy.'} Trying again by itself.`;
  return link.message ?? 'The connection was interrupted.';
}

function refusalText({ status, code, message }) {
  switch (status) {
    case 401:
      return message ?? 'This server asks for an API key.';
    case 404:
      if (code === 'session_not_found') return 'This conversation is not there any more, or it belongs to somebody else.';
      return message ?? 'The server does not know this address.';
    case 403:
      return `The server does not accept connections from this page's address (${location.origin}). Its operator can allow it with --allow-origin.`;
    default:
      return message ?? `The server refused the connection (HTTP ${status}).`;
  }
}

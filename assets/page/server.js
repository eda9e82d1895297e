// The server's HTTP interface: requests with the key of the reader, errors with their code, answers as a stream of events.
//
// The key is kept for the tab (sessionStorage) and sent as a header only, never as part of an address.

const KEY = "llmctl.key";
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setKey(given) {
  key = given;
  try {
    if (given === "") sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, given);
  } catch {
    // Without storage the key lasts as long as the page.
  }
}

export function hasKey() {
  return key !== "";
}

// An answer that is an error, or no answer: then `status` is 0.
export class ServerError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Called when a key is missing or refused; returns whether there is another one now.
let keyWanted = async () => false;
export function onKeyWanted(ask) {
  keyWanted = ask;
}

// Paths are relative to the page, because a proxy may have stripped a prefix.
async function send(path, { method = "GET", body, signal, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  const sent = key;
  if (sent !== "") headers.Authorization = `Bearer ${sent}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const text = body === undefined ? undefined : JSON.stringify(body);
    const address = new URL(path, document.baseURI);
    response = await fetch(address, { method, headers, body: text, signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "unreachable", "The server cannot be reached.");
  }
  if (response.status === 401 && (key !== sent || (await keyWanted(sent !== "")))) {
    return send(path, { method, body, signal, accept });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return new ServerError(response.status, error.code, error.message);
  } catch {
    return new ServerError(response.status, "error", `The server answered with status ${response.status}.`);
  }
}

export async function json(path, options) {
  return (await send(path, options)).json();
}

export async function text(path, options) {
  return (await send(path, options)).text();
}

// A session's path, whatever its id holds.
export function sessionPath(id, rest = "") {
  return `v1/sessions/${encodeURIComponent(id)}${rest}`;
}

// Sends a chat completion and hands its stream on: `onBranch` gets the name of the branch that the turn is in, where the answer's
// head has one, `onChunk` each object, `onWait` each comment.
export async function streamChat(body, { signal, onBranch, onChunk, onWait }) {
  const response = await send("v1/chat/completions", { method: "POST", body, signal, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  onBranch(response.headers.get("x-llmctl-branch"));
  let pending = "";
  let isDone = false;
  const take = (line) => {
    if (line.startsWith(":")) onWait(line.slice(1).trim());
    else if (line === "data: [DONE]") isDone = true;
    else if (line.startsWith("data: ")) onChunk(checked(JSON.parse(line.slice(6))));
  };
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "broken_off", "The connection to the server was lost before the answer ended.");
    });
    if (done) break;
    const lines = (pending + value).split("\n");
    pending = lines.pop();
    for (const line of lines) take(line.replace(/\r$/, ""));
  }
  if (!isDone) throw new ServerError(0, "broken_off", "The answer broke off: the server closed the connection.");
}

function checked(chunk) {
  if (chunk.error) throw new ServerError(200, chunk.error.code, chunk.error.message);
  return chunk;
}

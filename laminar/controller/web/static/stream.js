// The connection to the controller: frames as they come, and again after a pause when it breaks.

const FIRST_PAUSE_MS = 500;
const PAUSE_MS_MAX = 15000;
const SILENCE_MS = 5000; // frames come twice a second
const PATH = "/v1/dashboard";

export class Stream {
  /** `heard(frame)`, `opened()`, `lost(pause in ms, why)`, `refused()` when the token is needed. */
  constructor({ heard, opened, lost, refused }) {
    Object.assign(this, { heard, opened, lost, refused });
    this.pause = FIRST_PAUSE_MS;
    this.watch = null; // timer that ends a silent connection, or begins the next
    this.socket = null;
  }

  connect() {
    this.disconnect();
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = (this.socket = new WebSocket(`${scheme}://${location.host}${PATH}`));
    socket.binaryType = "arraybuffer";
    const decoder = new TextDecoder();
    let isFirst = true;
    socket.addEventListener("message", (event) => {
      if (socket !== this.socket) return;
      if (isFirst) this.opened();
      isFirst = false;
      this.pause = FIRST_PAUSE_MS;
      this.listen(socket);
      this.heard(JSON.parse(decoder.decode(event.data)));
    });
    socket.addEventListener("close", () => this.closed(socket, isFirst));
    this.listen(socket);
  }

  /** A connection on which nothing comes is closed. */
  listen(socket) {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => socket.close(), SILENCE_MS);
  }

  /** Say nothing more, whatever comes. */
  disconnect() {
    clearTimeout(this.watch);
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  async closed(socket, isRefused) {
    if (socket !== this.socket) return;
    clearTimeout(this.watch);
    const isOpen = await session();
    const why = isOpen && isRefused ? await refusal() : "";
    if (socket !== this.socket) return;
    if (isOpen === false) return this.refused();
    const pause = this.pause;
    this.pause = Math.min(2 * pause, PAUSE_MS_MAX);
    this.lost(pause, why);
    this.watch = setTimeout(() => this.connect(), pause);
  }
}

/** Whether this browser has shown the token; undefined = nobody answers. */
export async function session() {
  return (await asked("/session"))?.open;
}

/** Why no connection is taken; empty = it is not said. */
async function refusal() {
  return (await asked(PATH))?.error ?? "";
}

async function asked(path) {
  try {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MS) });
    return await answer.json();
  } catch {
    return undefined;
  }
}

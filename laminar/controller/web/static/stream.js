// The connection to the controller: frames as they come, and again after a pause when it breaks.

const FIRST_PAUSE_MS = 500;
const PAUSE_MS_MAX = 15000;
const SILENCE_MS = 5000; // frames come twice a second

export class Stream {
  /** `heard(frame)`, `opened()`, `lost(pause in ms)`, `refused()` when the token is needed. */
  constructor({ heard, opened, lost, refused }) {
    Object.assign(this, { heard, opened, lost, refused });
    this.pause = FIRST_PAUSE_MS;
    this.watch = null;
  }

  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/v1/dashboard`);
    socket.binaryType = "arraybuffer";
    const decoder = new TextDecoder();
    let isFirst = true;
    socket.addEventListener("message", (event) => {
      if (isFirst) this.opened();
      isFirst = false;
      this.pause = FIRST_PAUSE_MS;
      this.listen(socket);
      this.heard(JSON.parse(decoder.decode(event.data)));
    });
    socket.addEventListener("close", () => this.closed());
    this.listen(socket);
  }

  /** A connection on which nothing comes is closed. */
  listen(socket) {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => socket.close(), SILENCE_MS);
  }

  async closed() {
    clearTimeout(this.watch);
    if ((await session()) === false) return this.refused();
    const pause = this.pause;
    this.pause = Math.min(2 * pause, PAUSE_MS_MAX);
    this.lost(pause);
    setTimeout(() => this.connect(), pause);
  }
}

/** Whether this browser has shown the token; undefined = nobody answers. */
export async function session() {
  try {
    const answer = await fetch("/session", { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MS) });
    return (await answer.json()).open;
  } catch {
    return undefined;
  }
}

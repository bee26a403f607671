// Perfetto's trace processor between this process's pipes: node perfetto_engine.mjs DIRECTORY. It is WebAssembly, made for a worker of
// a browser; here its script finds as much of one as it asks for.
// Standard input: requests, each with its length in four bytes (little-endian) before it. Standard output: its answers as they are.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const directory = process.argv[2];
const read = (name) => fs.readFileSync(path.join(directory, path.basename(name)));
const complain = (...words) => process.stderr.write(words.join(" ").slice(0, 1000) + "\n");

class XMLHttpRequest {
  open(method, name) { this.name = name; }
  send() { this.response = new Uint8Array(read(this.name)).buffer; }
}

const worker = {
  console: { log: complain, warn: complain, error: complain },
  location: { href: "http://localhost/engine_bundle.js" },
  importScripts: () => {},
  WorkerGlobalScope: function () {},
  XMLHttpRequest, WebAssembly, performance, crypto, TextDecoder, TextEncoder, URL, setTimeout, clearTimeout,
  TypeError, Uint8Array,  // of this realm, from which WebAssembly and its memory come
};
worker.self = worker;
vm.createContext(worker);
const port = { postMessage: (bytes) => { for (let at = 0; at < bytes.length;) at += fs.writeSync(1, bytes, at); } };
process.on("uncaughtException", (error) => {
  complain(error.stack.split("\n").filter((line) => line.length < 300).join("\n"));  // not the script, which is one line
  process.exit(1);
});
vm.runInContext(read("engine_bundle.js").toString(), worker);
worker.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve, 0));  // it is instantiated at once, and ready in what follows that

let waiting = Buffer.alloc(0);
for await (const chunk of process.stdin) {
  waiting = Buffer.concat([waiting, chunk]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE(0)) {
    const end = 4 + waiting.readUInt32LE(0);
    port.onmessage({ data: new Uint8Array(waiting.subarray(4, end)) });
    waiting = waiting.subarray(end);
  }
}
process.exit(0);

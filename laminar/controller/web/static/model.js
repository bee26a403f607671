// What this page knows of the run: the sections and logs of the frames it was sent (laminar/controller/web/board.py).

export const KEPT_S = 900;
const SILENCE_S = 5;
const names = new Intl.Collator("en", { numeric: true });
const JOURNAL_MAX = 1000;
const STEPS_MAX = 4000;

export const ACTIVITIES = ["starting", "pulls weights", "generates", "drains", "idle", "evaluates", "suspect", "quarantined", "dead", "left"];
export const STARTING = 0, SYNCING = 1, GENERATING = 2, DRAINING = 3, IDLE = 4, EVALUATING = 5, SUSPECT = 6, QUARANTINED = 7, DEAD = 8, GONE = 9;

export class Model {
  constructor() {
    this.clear();
  }

  /** A new connection tells everything anew. */
  clear() {
    this.at = 0; // run time of the last frame, s
    this.heard = 0; // when it came, ms
    this.sections = {};
    this.order = []; // lanes as they are shown
    this.place = []; // by lane: where it is shown
    this.segments = []; // by lane: [start, end, activity, version] …
    this.moves = []; // [at, source, destination, num] …
    this.marks = []; // [at, kind, text] …
    this.trains = []; // [start, end, step] …
    this.journal = []; // [at, kind, text, subjects, because] …
    this.routine = []; // the same of what every step brings
    this.steps = []; // [step, values] …
  }

  /** Take a frame; the names of what it changed. */
  apply(frame) {
    const changed = new Set([...Object.keys(frame.sections), ...Object.keys(frame.logs)]);
    this.at = frame.at;
    this.heard = performance.now();
    Object.assign(this.sections, frame.sections);
    if (frame.sections.lanes) this.arrange(frame.sections.lanes);
    for (const [name, rows] of Object.entries(frame.logs)) this[`add_${name}`](rows);
    return changed;
  }

  /** Lanes come in the order of joining; they are shown by name, rollout-2 before rollout-10. */
  arrange(lanes) {
    this.order = lanes.map((_, lane) => lane).sort((a, b) => names.compare(lanes[a][0], lanes[b][0]));
    this.place = [];
    this.order.forEach((lane, place) => (this.place[lane] = place));
  }

  /** Run time now, s; it stands still when nothing is heard any more. */
  now() {
    return this.at + Math.min(SILENCE_S, (performance.now() - this.heard) / 1000);
  }

  add_segments(rows) {
    for (const [lane, ...segment] of rows) (this.segments[lane] ??= []).push(segment);
    for (const lane of this.segments) drop(lane ?? [], (segment) => segment[1] < this.at - KEPT_S);
  }

  add_moves(rows) {
    this.moves.push(...rows);
    drop(this.moves, (move) => move[0] < this.at - KEPT_S);
  }

  add_marks(rows) {
    this.marks.push(...rows);
    drop(this.marks, (mark) => mark[0] < this.at - KEPT_S);
  }

  add_trains(rows) {
    this.trains.push(...rows);
    drop(this.trains, (train) => train[1] < this.at - KEPT_S);
  }

  add_journal(rows) {
    keep(this.journal, rows, JOURNAL_MAX);
  }

  add_routine(rows) {
    keep(this.routine, rows, JOURNAL_MAX);
  }

  add_steps(rows) {
    const redone = rows.length ? this.steps.findIndex((step) => step[0] >= rows[0][0]) : -1;
    if (redone >= 0) this.steps.length = redone; // after a restore of the trainer
    keep(this.steps, rows, STEPS_MAX);
  }
}

/** Add rows, and drop the oldest if there are too many. */
function keep(known, rows, most) {
  known.push(...rows);
  if (known.length > most) known.splice(0, known.length - most);
}

/** Drop from the front what is old, once it is worth the trouble. */
function drop(rows, isOld) {
  let num = 0;
  while (num < rows.length && isOld(rows[num])) num += 1;
  if (num > 64) rows.splice(0, num);
}

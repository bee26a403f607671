"""The report as one HTML file."""

from itertools import pairwise

from laminar import __version__
from laminar.ids import Version
from laminar.report import charts, tables
from laminar.report.charts import Series, Span
from laminar.report.facts import PIECES_MAX, STALENESSES, Facts, natural
from laminar.report.markup import Child, Html, element, joined, table
from laminar.report.style import CSS
from laminar.report.words import date, duration

MEAN_STEPS = 3  # rewards of single steps are noisy; the first and last few say more


def page(facts: Facts) -> str:
    """The whole file."""
    sections = [
        ("Learning", learning(facts)), ("Throughput", throughput(facts)), ("Staleness", staleness(facts)),
        ("Versions", versions(facts)), ("Buffer", buffer(facts)), ("Ledger", tables.ledger(facts)),
        ("Faults", tables.faults(facts)), ("Slowest trajectories", tables.slowest(facts)),
        ("Configuration", tables.configuration(facts)),
    ]  # fmt: skip
    links = [element("a", title, href=f"#{_anchor(title)}") for title, _ in sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        element("title", f"{facts.name}: report"),
        element("style", Html(CSS)),
    )
    body = element(
        "body",
        header(facts),
        element("nav", *links),
        *(element("section", element("h2", title), content, id=_anchor(title)) for title, content in sections),
        element("p", f"Written by Laminar {__version__} on {date(facts.now)} from run.db.", class_="muted"),
    )
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# ---- the top -----------------------------------------------------------------------------------------------


def header(facts: Facts) -> Html:
    """Which run, how it stands, the figures that people ask for first."""
    steps = (
        facts.state.trainer.step
        if facts.state
        else max((step for step, _ in facts.metrics.get("timing/wall_s", ())), default=0)
    )
    planned = f" of {facts.config.run.steps}" if facts.config else ""
    line = f"step {steps}{planned} · {duration(facts.wall_s)} · began {date(facts.began)} · Laminar {facts.boots[-1].version}"
    if len(facts.boots) > 1:
        line += f" · {len(facts.boots)} controller processes"
    shown = [element("div", name, element("b", value), note, class_="card") for name, value, note in cards(facts)]
    return joined(
        element("h1", facts.name),
        element("p", facts.ending, class_="bad" if _is_bad(facts) else None),
        element("p", line, class_="muted"),
        element("p", facts.note, class_="muted") if facts.note else None,
        element("div", *shown, class_="cards"),
    )


def _is_bad(facts: Facts) -> bool:
    failed = facts.state is not None and not facts.state.ok
    return failed or facts.ending.startswith("ended without")


STEP_TIMES = ["timing/wall_s", "timing/step_s", "timing/fetch_s", "timing/prepare_s", "timing/update_s"]
STALLS = ["perf/publication_stall_s", "perf/rollout_wait_s", "perf/checkpoint_stall_s"]
STEP = "a step"
FIGURES = (
    ("generation", "perf/generation_tokens_per_s", ",.0f", "tokens/s, mean of steps"),
    ("training", "perf/training_tokens_per_s", ",.0f", "tokens/s, mean of steps"),
    ("trainer idle", "perf/trainer_idle_ratio", ".0%", "of the time, mean of steps"),
    ("rollouts idle", "perf/rollout_idle_ratio", ".0%", "of the time, mean of steps"),
    ("staleness", "off_policy/s_train/mean", ".2f", "trainer steps, mean of steps"),
    (STEP, "timing/wall_s", ".2f", "seconds, mean of all but the first"),
)
"""(name, metric, format, remark) of what is shown first."""


def cards(facts: Facts) -> list[tuple[str, str, str]]:
    """(name, value, remark)."""
    found, rewards = [], facts.values("reward/mean")
    if rewards:
        first, last = _mean(rewards[:MEAN_STEPS]), _mean(rewards[-MEAN_STEPS:])
        found.append(("reward", f"{first:.3f} → {last:.3f}", f"mean of first and last {MEAN_STEPS} steps"))
    done = {each.name: each for each in facts.state.evaluations if each.num_prompts} if facts.state else {}
    if "before" in done:
        after = f"{done['after'].accuracy:.3f}" if "after" in done else "–"
        remark = f"{done['before'].num_prompts} held-out prompts"
        found.append(("greedy accuracy", f"{done['before'].accuracy:.3f} → {after}", remark))
    for name, metric, form, remark in FIGURES:
        if values := facts.values(metric):
            of = values[1:] or values if name == STEP else values  # the first contains the start of the workers
            found.append((name, format(_mean(of), form), remark))
    return [*found, ("alarms", str(len(facts.alarms)), "")]


# ---- sections ----------------------------------------------------------------------------------------------


def learning(facts: Facts) -> Html:
    """Rewards and what tells whether training is sound."""
    reward, spread = facts.metrics.get("reward/mean", []), dict(facts.metrics.get("reward/std", []))
    band = [(float(step), value - spread[step], value + spread[step]) for step, value in reward if step in spread]
    plots = [
        _chart(
            "Reward: mean, and the spread of a batch", charts.lines([_series("mean", reward)], "train step", band=band)
        ),
        _plot(facts, "Policy entropy", ["actor/entropy"], "nats per token"),
        _plot(facts, "Gradient norm before clipping", ["actor/grad_norm"]),
        _plot(facts, "Policy loss", ["actor/pg_loss"]),
        _plot(facts, "Share of clipped tokens", ["actor/pg_clipfrac"]),
        _plot(facts, "KL of the update", ["actor/ppo_kl"], "nats per token"),
        _plot(facts, "Importance ratio, trainer to rollout", ["importance_ratio/mean", "importance_ratio/max"]),
        _plot(
            facts,
            "Between rollouts and trainer",
            ["mismatch_kl/mean", "canary/logprob_abs_diff/mean"],
            "nats per token",
        ),
        _plot(facts, "Response length", ["response_length/mean"], "tokens"),
        _plot(
            facts,
            "Groups without a signal, responses cut off",
            ["advantage/zero_fraction", "is_truncated/mean"],
            "share of the batch",
        ),
        _plot(facts, "Learning rate", ["actor/lr"]),
    ]
    evaluations = [e for e in facts.state.evaluations if e.num_prompts] if facts.state else []
    rows: list[list[Child]] = [
        [e.name, str(e.version), f"{e.accuracy:.3f}", f"{e.score:.3f}", e.num_prompts] for e in evaluations
    ]
    shown = table(["evaluation", "version", "greedy accuracy", "mean reward", "prompts"], rows, 2) if rows else None
    return joined(_charts(plots), shown)


def throughput(facts: Facts) -> Html:
    """Tokens, times, and who waits."""
    plots = [
        _plot(facts, "Tokens", ["perf/generation_tokens_per_s", "perf/training_tokens_per_s"], "tokens/s"),
        _plot(facts, "Idle shares", ["perf/trainer_idle_ratio", "perf/rollout_idle_ratio"], "of a step's time"),
        _plot(facts, "A step, but for the first", STEP_TIMES, "s", skipped=1),
        _plot(facts, "Standing still for weights and checkpoints", STALLS, "s"),
        _plot(
            facts, "A trajectory, from draw to last token", ["timing/trajectory_s/mean", "timing/trajectory_s/max"], "s"
        ),
        _plot(facts, "The controller: loop and disk", ["event_loop_lag/max", "log/commit_lag_s/max"], "s"),
    ]
    rows: list[list[Child]] = [
        [w.name, f"{w.decode_s:,.1f}", f"{w.decode_s / facts.wall_s:.0%}" if facts.wall_s else "–", w.num_pulls,
         f"{1e3 * w.pull_s / w.num_pulls:,.1f}" if w.num_pulls else "–", w.num_out, w.num_in]
        for w in facts.workers
    ]  # fmt: skip
    head = ["replica", "decoded, s", "of the run", "pulls", "mean pull, ms", "moved away", "moved here"]
    return joined(_charts(plots), table(head, rows) if rows else None)


def staleness(facts: Facts) -> Html:
    """The three histograms of everything that was trained."""
    titles = ("made while it was generated", "made while it waited in the buffer", "both: how old the weights were")
    plots, rows = list[Html | None](), list[list[Child]]()
    for name, title in zip(STALENESSES, titles, strict=True):
        counts = facts.staleness[name]
        plots.append(
            _chart(
                f"{name}: trainer steps {title}",
                charts.bars([(str(value), num) for value, num in counts], "trainer steps"),
            )
        )
        total = sum(num for _, num in counts)
        if total:
            mean = sum(value * num for value, num in counts) / total
            rows.append([name, f"{mean:.3f}", max(value for value, _ in counts), f"{total:,}"])
    plots.append(_plot(facts, "Over the run", [f"off_policy/{name}/mean" for name in STALENESSES], "trainer steps"))
    sums = table(["", "mean", "max", "trained trajectories"], rows) if rows else None
    return joined(_charts(plots), sums, tables.without_gone(facts))


def versions(facts: Facts) -> Html:
    """Who held which weights when."""
    if not facts.pulls:
        return element("p", "no replica has pulled weights", class_="muted")
    first = min([facts.pulls[0].end, *(train.start for train in facts.trains)])
    begin = first if len(facts.pulls) < PIECES_MAX else facts.pulls[0].end
    end = max(facts.last_at, facts.pulls[-1].end)
    remark = "Each row is a replica, each colour a weight version from one pull to the next; the first row is the trainer at work."
    if begin > first or len(facts.pulls) == PIECES_MAX:
        remark += f" The last {duration(end - begin)} only."
    rows = [("trainer", _at_work(facts, begin)), *_held(facts, end)]
    lanes = charts.lanes(rows, begin - facts.began, end - facts.began, "seconds since the run's start")
    return joined(element("p", remark, class_="muted"), element("div", lanes, class_="chart"))


def _at_work(facts: Facts, begin: float) -> list[Span]:
    trains = [train for train in facts.trains if train.end > begin]
    return [Span(t.start - facts.began, t.end - facts.began, -1, f"step {t.what[1:]}") for t in trains]


def _held(facts: Facts, end: float) -> list[tuple[str, list[Span]]]:
    pulls: dict[str, list[tuple[float, str]]] = {}
    for pull in facts.pulls:
        pulls.setdefault(pull.worker, []).append((pull.end - facts.began, pull.what))
    rows = []
    for worker in sorted(pulls, key=natural):
        changes = pairwise([*pulls[worker], (end - facts.began, "")])
        rows.append((worker, [Span(start, stop, _shade(what), what) for (start, what), (stop, _) in changes]))
    return rows


def _shade(what: str) -> int:
    return Version.parse(what).step if what else 0


def buffer(facts: Facts) -> Html:
    """What waits, and how full the replicas are."""
    at = [level.at - facts.began for level in facts.levels]

    def over_time(title: str, unit: str = "", **values: list[float]) -> Html | None:
        series = [Series(name.replace("_", " "), list(zip(at, each, strict=True))) for name, each in values.items()]
        return _chart(title, charts.lines(series, "seconds since the run's start", unit)) if at else None

    in_flight, generating = (
        [float(getattr(level, name)) for level in facts.levels] for name in ("in_flight", "generating")
    )
    plots = [
        over_time("Complete groups in the buffer", groups=[float(level.buffer_groups) for level in facts.levels]),
        over_time("Trajectories", in_flight=in_flight, generating=generating),
        over_time(
            "KV cache of all replicas",
            "%",
            used=[100 * each.kv_tokens / max(1, each.kv_tokens_max) for each in facts.levels],
        ),
        _plot(facts, "Age of what waits, at the end of a step", ["buffer/age_s/mean", "buffer/age_s/max"], "s"),
    ]
    return _charts(plots)


# ---- pieces ------------------------------------------------------------------------------------------------


def _plot(facts: Facts, title: str, names: list[str], unit: str = "", skipped: int = 0) -> Html | None:
    """Of metrics, as far as there are any, without the first `skipped` steps."""
    series = [_series(name, facts.metrics[name][skipped:]) for name in names if name in facts.metrics]
    return _chart(title, charts.lines(series, "train step", unit)) if series else None


def _series(label: str, points: list[tuple[int, float]]) -> Series:
    return Series(label, [(float(step), value) for step, value in points])


def _chart(title: str, content: Html) -> Html:
    return element("div", element("h3", title), content, class_="chart")


def _charts(plots: list[Html | None]) -> Html:
    known = [plot for plot in plots if plot is not None]
    return element("div", *known, class_="charts") if known else element("p", "no step has ended", class_="muted")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

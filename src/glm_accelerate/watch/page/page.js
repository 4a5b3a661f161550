"use strict";
// events -> columns of each run -> charts, tables, log. Texts come from runs: they are only ever set as text.

const WORDS = {
  en: {
    language: "中文", loss: "Loss", rate: "Learning rate", norm: "Gradient norm", speed: "Tokens a second",
    memory: "Memory", stall: "Training waited", step: "step", smooth: "smoothed", heldOut: "held out",
    plan: "as the plan said", saves: "for a checkpoint", evals: "for an evaluation", values: "values",
    evaluations: "Evaluations", log: "What happened", plans: "The plan", interval: "95 % interval",
    samples: "samples", against: "against", verdict: "verdict", answers: "answers", show: "show", when: "when",
    what: "what", kind: "kind", value: "value", why: "why", left: "left", of: "of", done: "finished", stopped: "stopped",
    silent: "no event for", waiting: "has not begun", training: "training", run: "run", prompt: "Prompt",
    answer: "Answer", reference: "Expected", none: "none yet", metrics: "metrics",
    start: "begins", resume: "goes on", warning: "warning", decision: "decision", stop: "ends", thinned: "one of so many steps is drawn:",
    better: "better", worse: "worse", tied: "tied", undecided: "undecided", failed: "failed", ranks: "ranks",
    nodes: "Nodes and ranks", node: "node", rank: "rank", process: "process", sign: "sign of life", load: "load", cores: "cores",
    free: "memory free", others: "held by other processes", ago: "ago", seconds: "s", more: "more", nobody: "nobody", phase: "doing",
    silentFor: "no sign for", stoppedNow: "stopped by a signal (SIGSTOP); no sign for", ended: "ended", gone: "its process is gone",
    leftOut: "not in the newest start; last sign", said: "reported",
    starting: "starting", proving: "proving", evaluating: "evaluating", saving: "saving",
  },
  zh: {
    language: "English", loss: "损失", rate: "学习率", norm: "梯度范数", speed: "每秒 token 数",
    memory: "显存（内存）", stall: "训练等待的时间", step: "步", smooth: "平滑", heldOut: "验证集",
    plan: "plan 的预测", saves: "为检查点", evals: "为评测", values: "数值",
    evaluations: "评测", log: "事件", plans: "运行计划", interval: "95% 置信区间",
    samples: "样本数", against: "对比", verdict: "结论", answers: "回答", show: "查看", when: "时间",
    what: "内容", kind: "类型", value: "取值", why: "原因", left: "剩余", of: "/", done: "已完成", stopped: "已停止",
    silent: "没有新事件已", waiting: "尚未开始", training: "训练中", run: "运行", prompt: "提示",
    answer: "回答", reference: "参考答案", none: "暂无", metrics: "指标",
    start: "开始", resume: "继续", warning: "警告", decision: "决定", stop: "结束", thinned: "步数很多，每隔几步画一点：",
    better: "更好", worse: "更差", tied: "相当", undecided: "未定", failed: "失败", ranks: "个 rank",
    nodes: "节点与 rank", node: "节点", rank: "rank", process: "进程", sign: "存活信号", load: "负载", cores: "核",
    free: "空闲内存", others: "其他进程占用", ago: "前", seconds: "秒", more: "个未列出", nobody: "无", phase: "正在做",
    silentFor: "无信号已", stoppedNow: "被信号暂停（SIGSTOP），无信号已", ended: "已结束", gone: "进程已不存在",
    leftOut: "不在最近一次启动中，最后信号距今", said: "上报时间",
    starting: "启动", proving: "自检", evaluating: "评测", saving: "保存",
  },
};
const SILENT = 60, POLL = 2000, MOST = 8000, ROWS = 200;  // seconds, milliseconds, steps, rows of a table
const COLUMNS = { loss: "loss", rate: "learning_rate", norm: "grad_norm", speed: "tokens_per_second", memory: "memory_bytes" };
const $ = (id) => document.getElementById(id);
const embedded = $("data") && JSON.parse($("data").textContent);
let language = navigator.language.startsWith("zh") ? "zh" : "en", runs = [], drawn = {}, open = null;
const t = (word) => WORDS[language][word] ?? word;
const at = (step) => language === "zh" ? `第 ${step} 步` : `step ${step}`;

function element(kind, text, inside = [], marks = {}) {
  const made = document.createElement(kind);
  if (text !== null && text !== undefined) made.textContent = text;
  made.append(...inside);
  for (const [name, value] of Object.entries(marks)) made.setAttribute(name, value);
  return made;
}

function begun(about) {
  return { ...about, next: 0, every: 1, steps: [], evals: [], saves: [], log: [], nodes: about.nodes || [], info: null, stop: null, newest: 0 };
}

function take(run, event) {
  run.newest = Math.max(run.newest, event.time || 0);
  if (event.kind === "start" || event.kind === "resume") {
    for (const name of ["steps", "evals", "saves"]) run[name] = run[name].filter((each) => each.step <= event.step);
    run.info = event;
    run.stop = null;
    run.log.push({ ...event, said: at(event.step) });
  } else if (event.kind === "step") {
    run.steps.push(event);
    if (run.steps.length > MOST) run.steps = run.steps.filter((_, place, all) => place % 2 || place === all.length - 1);
  } else if (event.kind === "eval") {
    run.evals.push(event);
  } else if (event.kind === "checkpoint") {
    run.saves.push(event);
  } else if (event.kind === "warning" || event.kind === "decision") {
    run.log.push(event);
  } else if (event.kind === "stop") {
    run.stop = event;
    run.log.push({ ...event, said: `${event.reason}, ${at(event.step)}` });
  }
}

// What each chart draws of a run: name, x, y, and how.
const pick = (run, name, scale = 1) => [run.steps.map((one) => one.step), run.steps.map((one) => one[name] == null ? null : one[name] / scale)];
function smoothed(values) {
  let level = null, seen = 0;
  const least = 1 / Math.max(4, Math.min(50, values.length / 30));  // of the newest value; the first weigh more
  return values.map((value) => value == null ? level : (level = level == null ? value : level + Math.max(least, 1 / ++seen) * (value - level)));
}
const CHARTS = {
  loss: (run) => {
    const [x, y] = pick(run, COLUMNS.loss), scored = run.evals.filter((one) => one.loss != null);
    const places = scored.map((one) => one.step), ends = (side) => scored.map((one) => one.ci95 ? one.ci95[side] : one.loss);
    return [
      { name: t("loss"), x, y, faint: true },
      { name: t("smooth"), x, y: smoothed(y) },
      { name: t("heldOut"), x: places, y: scored.map((one) => one.loss), points: true },
      { name: "", x: places, y: ends(1), edge: true }, { name: "", x: places, y: ends(0), edge: true, band: true },
    ];
  },
  rate: (run) => line(run, "rate"),
  norm: (run) => line(run, "norm"),
  speed: (run) => { const [x, y] = pick(run, COLUMNS.speed); return [{ name: t("speed"), x, y, faint: true }, { name: t("smooth"), x, y: smoothed(y) }]; },
  memory: (run) => {
    const [x, y] = pick(run, COLUMNS.memory, 2 ** 30), plan = run.memory ? run.memory / 2 ** 30 : null;
    const ends = x.length ? [x[0], x[x.length - 1]].filter((one, place, all) => !place || one > all[0]) : [];
    return [{ name: "GiB", x, y }, { name: t("plan"), x: ends, y: ends.map(() => plan), dashed: true }];
  },
  stall: (run) => [
    { name: t("saves"), x: run.saves.map((one) => one.step), y: run.saves.map((one) => one.blocked_seconds), points: true, alone: true },
    { name: t("evals"), ...waited(run), points: true, alone: true, hollow: true },
  ],
};
const line = (run, chart) => { const [x, y] = pick(run, COLUMNS[chart]); return [{ name: t(chart), x, y }]; };
const waited = (run) => {
  const here = run.evals.filter((one) => one.where === "inline");
  return { x: here.map((one) => one.step), y: here.map((one) => one.seconds) };
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();

function options(lines, width) {
  const ink = colour("--soft"), grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
  const series = lines.map(({ run, how }) => {
    const stroke = colour(`--c${run % 6}`), own = how.edge ? "transparent" : how.faint ? stroke + "55" : stroke;
    const other = how.points && runs.length === 1 ? colour("--c1") : own;
    return {
      stroke: other, width: how.edge ? 0 : how.faint ? 1 : 2, dash: how.dashed ? [6, 4] : undefined, spanGaps: true,
      points: { show: !!how.points && (how.alone || how.x.length < 300), size: 7, stroke: other, fill: how.hollow ? colour("--paper") : other },
      paths: how.alone ? () => null : undefined,
    };
  });
  const bands = lines.flatMap(({ how }, place) => how.band ? [{ series: [place, place + 1], fill: colour(runs.length === 1 ? "--c1" : "--c5") + "33" }] : []);
  return {
    width, height: 240, padding: [8, 26, 0, 0], cursor: { y: false }, legend: { show: false }, bands, scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map(short) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(short) }], series: [{}, ...series],
  };
}

function draw(name) {
  const figure = drawn[name].figure, lines = [];
  runs.forEach((run, number) => { for (const how of CHARTS[name](run)) if (how.y.some((y) => y != null)) lines.push({ run: number, how }); });
  const shape = lines.map(({ run, how }) => `${run}${how.name}${how.edge}`).join() + language + document.documentElement.className;
  const data = lines.length ? uPlot.join(lines.map(({ how }) => [how.x, how.y])) : [[]];
  const place = figure.querySelector(".plot");
  if (drawn[name].shape !== shape) {
    drawn[name].plot?.destroy();
    drawn[name].plot = lines.length ? new uPlot(options(lines, place.clientWidth), data, place) : null;
    drawn[name].shape = shape;
  } else drawn[name].plot?.setData(data);
  const many = runs.length > 1;  // then a figure each is enough
  const newest = lines.filter(({ how }) => how.name && !(many && (how.faint || how.dashed))).map(({ run, how }) => {
    const last = how.x.length - 1, which = many ? `${runs[run].name}: ` : "";
    return `${which}${how.name} ${short(how.y[last])}${how.dashed || many ? "" : ` (${at(how.x[last])})`}`;
  });
  const said = newest.join(" · ") || t("none");
  figure.querySelector("p").textContent = said;
  place.setAttribute("aria-label", `${t(name)}: ${said}`);
  if (figure.querySelector("details").open) tabulate(figure, lines);
}

function tabulate(figure, lines) {
  const rows = lines.filter(({ how }) => how.name && !how.dashed).flatMap(({ run, how }) =>
    how.x.slice(-20).map((x, place) => [runs[run].name, how.name, x, short(how.y.slice(-20)[place])]));
  figure.querySelector(".scroll").replaceChildren(table([t("run"), t("what"), t("step"), t("value")], rows));
}

function table(head, rows) {
  const cells = (row, kind) => element("tr", null, row.map((cell) => cell instanceof Node ? element("td", null, [cell]) : element(kind, String(cell))));
  const made = element("table", null, [element("thead", null, [cells(head, "th")]), element("tbody", null, rows.map((row) => cells(row, "td")))]);
  made.querySelectorAll("th").forEach((one) => one.setAttribute("scope", "col"));
  return made;
}

function span(seconds) {
  const whole = Math.max(0, Math.round(seconds)), two = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

function state(run) {
  const last = run.steps[run.steps.length - 1], position = last ? last.step : run.info ? run.info.step : 0, total = run.info?.steps;
  const words = [];
  if (total) words.push(`${at(position.toLocaleString("en"))} ${t("of")} ${total.toLocaleString("en")}`);
  if (run.stop) words.push(run.stop.reason === "done" ? t("done") : `${t("stopped")}: ${run.stop.reason}`);
  else if (!run.info) words.push(t("waiting"));
  else {
    const recent = run.steps.slice(-50), first = recent[0], age = Date.now() / 1000 - run.newest;
    if (age > SILENT) words.push(`${t("silent")} ${span(age)}`);
    else words.push(t("training"));
    if (recent.length > 1 && total) words.push(`${span((last.time - first.time) / (last.step - first.step) * (total - position))} ${t("left")}`);
  }
  if (last) words.push(`${t("loss")} ${short(last.loss)}`);
  return words.join(" · ");
}

function stamp(time) { return new Date(time * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en-GB"); }

function shown(run, event) {
  const button = element("button", t("show"), [], { type: "button" });
  button.addEventListener("click", async () => {
    const found = embedded ? runs[run].answers[event.step] || [] : await ask(`answers?run=${run}&step=${event.step}`);
    open = [`${runs[run].name}, ${at(event.step)}`, found];
    evaluations();
    $("answers")?.focus();
  });
  return button;
}

function evaluations() {
  const rows = runs.flatMap((run, number) => run.evals.slice(-ROWS).map((event) => ({ run: number, event })))
    .sort((one, other) => other.event.time - one.event.time).slice(0, ROWS).map(({ run, event }) => {
      const against = event.against, verdict = against ? against.verdict : event.status === "done" ? "" : event.status;
      const metrics = Object.entries(event.metrics || {}).map(([name, value]) => `${name} ${short(value)}`).join(", ");
      return [...(runs.length > 1 ? [runs[run].name] : []), event.step, short(event.loss), event.ci95 ? event.ci95.map(short).join(" – ") : "–", event.samples ?? "–",
        against ? `${against.step}: ${short(against.difference)}` : "–", element("span", t(verdict), [], { class: verdict }), metrics || "–",
        event.answers ? shown(run, event) : "–"];
    });
  const head = [...(runs.length > 1 ? [t("run")] : []), t("step"), t("loss"), t("interval"), t("samples"), t("against"), t("verdict"), t("metrics"), t("answers")];
  const parts = [element("h2", t("evaluations")), rows.length ? scroll(table(head, rows), t("evaluations")) : element("p", t("none"))];
  if (open) {
    parts.push(element("h2", open[0], [], { id: "answers", tabindex: "-1" }));
    for (const one of open[1]) for (const name of ["prompt", "answer", "reference"])
      if (one[name] != null) parts.push(element("strong", t(name)), element("pre", one[name]));
  }
  $("evaluations").replaceChildren(...parts);
}

const ago = (seconds) => `${seconds < 60 ? `${Math.round(seconds)} ${t("seconds")}` : span(seconds)} ${t("ago")}`;

// How a rank is, in words: colour alone tells nobody.
function sign(rank) {
  const since = rank.seconds == null ? "" : span(rank.seconds);
  const words = {
    alive: () => ago(rank.seconds), silent: () => `${t("silentFor")} ${since}`,
    stopped: () => `${t("stoppedNow")} ${since}`, ended: () => t("ended"), gone: () => t("gone"), left: () => `${t("leftOut")} ${since}`,
  }[rank.state]();
  return element("span", words, [], { class: { silent: "warning", stopped: "warning", gone: "warning" }[rank.state] || "" });
}

function nodes() {
  const many = runs.length > 1, gib = (bytes) => `${short(bytes / 2 ** 30)} GiB`;
  const every = runs.flatMap((run) => run.nodes.map((node) => ({ run: many ? [run.name] : [], node })));
  if (!every.length) { $("nodes").replaceChildren(); return; }
  const held = (one) => {
    const rest = one.count - one.named.length, names = one.named.join(", ") + (rest > 0 ? `, ${rest} ${t("more")}` : "");
    return `${one.device}: ${one.count ? `${gib(one.bytes)} (${names})` : t("nobody")}`;
  };
  const machines = every.map(({ run, node }) => [...run, node.node, `${node.load.toFixed(1)} / ${node.cores} ${t("cores")}`,
    `${gib(node.free)} / ${gib(node.whole)}`, node.others.map(held).join("; ") || "–", ago(node.age)]);
  const ranks = every.flatMap(({ run, node }) => node.ranks.map((rank) => [...run, rank.rank, node.node, rank.process ?? "–", rank.step ?? "–",
    rank.phase ? t(rank.phase) : "–", sign(rank)]));
  const first = many ? [t("run")] : [];
  const tables = [table([...first, t("node"), t("load"), t("free"), t("others"), t("said")], machines),
    table([...first, t("rank"), t("node"), t("process"), t("step"), t("phase"), t("sign")], ranks)];
  const there = [...$("nodes").querySelectorAll(".scroll")];  // they keep their place and the focus
  if (there.length) there.forEach((region, place) => region.replaceChildren(tables[place]));
  else $("nodes").replaceChildren(element("h2", ""), scroll(tables[0], ""), scroll(tables[1], ""));
  $("nodes").querySelector("h2").textContent = t("nodes");
  [t("load"), t("sign")].forEach((label, place) => $("nodes").querySelectorAll(".scroll")[place].setAttribute("aria-label", label));
}

const scroll = (inside, label) => element("div", null, [inside], { class: "scroll", tabindex: "0", role: "region", "aria-label": label });

function lists() {
  nodes();
  const many = runs.length > 1;
  $("runs").replaceChildren(...runs.map((run, number) => {
    const about = run.info ? [run.info.family, run.info.method, run.info.device, `${run.info.ranks} ${t("ranks")}`].join(" · ") : "";
    const thin = run.every > 1 ? ` · ${t("thinned")} ${run.every}` : "";
    const card = element("div", null, [element("strong", run.name), element("span", about), element("br"), element("span", state(run) + thin)], { class: "run" });
    card.style.borderLeftColor = `var(--c${number % 6})`;
    return card;
  }));
  const log = runs.flatMap((run) => run.log.slice(-ROWS).map((event) => ({ run, event })))
    .sort((one, other) => other.event.time - one.event.time).slice(0, ROWS)
    .map(({ run, event }) => [stamp(event.time), many ? run.name : element("span", t(event.kind), [], { class: event.kind }), event.step ?? "–", event.said ?? ""]);
  const head = [t("when"), many ? t("run") : t("kind"), t("step"), t("what")];
  $("log").replaceChildren(element("h2", t("log")), log.length ? scroll(table(head, log), t("log")) : element("p", t("none")));
}

function frame() {
  document.documentElement.lang = language;
  $("language").textContent = t("language");
  $("language").setAttribute("lang", language === "zh" ? "en" : "zh");
  $("charts").replaceChildren(...Object.keys(CHARTS).map((name) => {
    const figure = element("figure", null, [
      element("figcaption", null, [element("h2", t(name)), element("p", "")]),
      element("div", null, [], { class: "plot", role: "img" }),
      element("details", null, [element("summary", t("values")), element("div", null, [], { class: "scroll", tabindex: "0" })]),
    ]);
    figure.querySelector("details").addEventListener("toggle", () => draw(name));
    drawn[name]?.plot?.destroy();
    drawn[name] = { figure, plot: null, shape: null };
    return figure;
  }));
  const plans = runs.filter((run) => run.reasons.length).map((run) => element("details", null, [
    element("summary", `${t("plans")}: ${run.name}`), scroll(table([t("what"), t("value"), t("why")], run.reasons), t("plans"))]));
  $("plans").replaceChildren(...plans);
  redraw();
}

function redraw() {
  for (const name of Object.keys(CHARTS)) draw(name);
  evaluations();
  lists();
  if (runs.some((run) => run.info || run.steps.length)) document.documentElement.dataset.drawn ??= performance.now();
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function poll() {
  let news = false;
  try {
    for (const [number, run] of runs.entries()) {
      const found = await ask(`events?run=${number}&from=${run.next}`);
      if (found.next < run.next) Object.assign(run, begun(run));  // the log begins anew
      run.next = found.next;
      run.nodes = found.nodes;
      run.every = Math.max(run.every, found.every);
      for (const event of found.events) take(run, event);
      news ||= found.events.length > 0;
    }
    $("state").textContent = "";
    if (!Object.keys(drawn).length) frame();
    else if (news) redraw();
    else lists();
  } catch (error) { $("state").textContent = String(error.message || error); }
  setTimeout(poll, document.hidden ? 5 * POLL : POLL);
}

async function main() {
  $("language").addEventListener("click", () => { language = language === "zh" ? "en" : "zh"; frame(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", frame);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(innerWidth - width) < 2) return;
    width = innerWidth;
    for (const each of Object.values(drawn)) each.plot?.setSize({ width: each.figure.querySelector(".plot").clientWidth, height: 240 });
  }).observe(document.body);
  runs = (embedded || await ask("runs")).map(begun);
  if (embedded) embedded.forEach((each, number) => each.events.forEach((event) => take(runs[number], event)));
  if (embedded) frame(); else poll();
}
main().catch((error) => { $("state").textContent = String(error.message || error); });

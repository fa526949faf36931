"use strict";
// Curves as SVG. A chart is a panel of the payload and what the controls say; nothing is fetched.
const SPACE = {left: 50, right: 10, top: 8, bottom: 22}, HEIGHT = 210;
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "1 5", "12 3 2 3 2 3", "4 6"];

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// Mean of up to `reach` points on either side, as many on both; null is left out.
function smoothed(values, reach) {
  return values.map((_, place) => {
    const near = Math.min(place, values.length - 1 - place, reach);
    const kept = values.slice(place - near, place + near + 1).filter((one) => one !== null);
    return kept.length ? kept.reduce((sum, one) => sum + one, 0) / kept.length : null;
  });
}

// The same within each phase, so that none runs into the next.
function apart(xs, values, reach, payload) {
  const cuts = payload.runs.flatMap((run) => run.borders.map((border) => border[0]));
  const found = [];
  let begin = 0;
  for (let place = 1; place <= xs.length; place++)
    if (place === xs.length || cuts.some((cut) => xs[place - 1] < cut && cut < xs[place])) {
      found.push(...smoothed(values.slice(begin, place), reach));
      begin = place;
    }
  return found;
}

// Runs of one setting: mean, least and greatest where all of them have a value.
function merged(rows) {
  const seen = new Map();
  for (const [xs, ys] of rows)
    xs.forEach((x, i) => seen.set(x, [...(seen.get(x) || []), ys[i]]));
  const xs = [...seen.keys()].filter((x) => seen.get(x).length === rows.length)
    .sort((one, other) => one - other);
  const of = (how) => xs.map((x) => how(seen.get(x)));
  return {x: xs, low: of((ys) => Math.min(...ys)), high: of((ys) => Math.max(...ys)),
    y: of((ys) => ys.reduce((sum, one) => sum + one, 0) / ys.length)};
}

// What is drawn of a panel: lines with colour and dash, several runs of a setting as one.
function curves(panel, payload, options) {
  const many = payload.settings.length > 1, found = [];
  const look = (setting, label) => ({
    colour: `var(--c${(many ? setting : label) % 8})`,
    dash: many ? DASHES[label % DASHES.length] : "",
    name: many ? payload.settings[setting].name : panel.labels[label]});
  payload.settings.forEach((setting, place) => panel.labels.forEach((label, number) => {
    const rows = panel.series.filter((one) => setting.runs.includes(one[0]) && one[1] === number)
      .map((one) => [one[2], one[3]]);
    if (!rows.length) return;
    const style = {...look(place, number), label};
    const band = rows.length > 1 && options.seeds === "band" ? merged(rows) : null;
    if (band && band.x.length) found.push({...style, ...band});
    else for (const [x, y] of rows) found.push({...style, x, y});
  }));
  return found;
}

function ticks(low, high, count) {
  const rough = (high - low) / count, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * base >= rough) * base, found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step)
    found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const one of [1, 3]) found.push(one * 10 ** power);
  const inside = found.filter((one) => one >= low * 0.999 && one <= high * 1.001);
  const every = Math.ceil(inside.length / 6);
  return inside.filter((_, place) => place % every === 0);
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return (value / 1e3).toPrecision(3) * 1 + "k";
  if (size >= 1e-3 || !size) return String(+value.toPrecision(4));
  return value.toExponential(1).replace(".0e", "e");
}

// Scales, grid and axes; returns the functions from values to places.
function frame(panel, node, width, xs, ys) {
  const inner = width - SPACE.left - SPACE.right, floor = HEIGHT - SPACE.bottom;
  let [low, high] = [Math.min(...xs), Math.max(...xs)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const x = (value) => SPACE.left + inner * (value - low) / (high - low);
  const good = ys.filter((one) => one !== null && (!panel.log || one > 0));
  let [least, most] = [Math.min(...good), Math.max(...good)];
  if (!good.length) [least, most] = panel.log ? [0.1, 1] : [0, 1];
  if (!panel.log && panel.limits[0] !== null) least = panel.limits[0];
  if (!panel.log && panel.limits[1] !== null) most = panel.limits[1];
  if (least === most)
    [least, most] = panel.log ? [least / 2, most * 2] : [least - (least ? 0.5 : 0), most + 0.5];
  const scale = panel.log ? Math.log10 : (value) => value;
  const span = scale(most) - scale(least), spare = panel.limits[1] === null ? 0.05 * span : 0;
  const y = (value) => floor - (floor - SPACE.top) * (scale(value) - scale(least)) /
    (span + spare);
  for (const at of panel.log ? logTicks(least, most) : ticks(Math.max(least, -1e300), most, 4)) {
    svg(node, "line", {class: "grid", x1: SPACE.left, x2: width - SPACE.right, y1: y(at),
      y2: y(at)});
    svg(node, "text", {x: SPACE.left - 6, y: y(at) + 4, "text-anchor": "end"}, short(at));
  }
  for (const at of ticks(low, high, Math.max(2, inner / 90)).filter(Number.isInteger))
    svg(node, "text", {x: x(at), y: HEIGHT - 6, "text-anchor": "middle"}, String(at));
  return {x, y, low, high, floor};
}

function path(xs, ys, at, log) {
  let text = "", open = false;
  xs.forEach((one, place) => {
    const value = ys[place], good = value !== null && (!log || value > 0);
    if (good) text += (open ? "L" : "M") + at.x(one).toFixed(1) + " " + at.y(value).toFixed(1);
    open = good;
  });
  return text;
}

function borders(node, at, runs) {
  const seen = new Set();
  for (const [place, name] of runs.flatMap((run) => run.borders)) {
    if (seen.has(place + name) || place < at.low || place > at.high) continue;
    seen.add(place + name);
    svg(node, "line", {class: "border", x1: at.x(place), x2: at.x(place), y1: SPACE.top,
      y2: at.floor});
    svg(node, "text", {x: at.x(place) + 4, y: SPACE.top + 10}, name);
  }
}

function drawLines(panel, node, width, payload, options) {
  const found = curves(panel, payload, options);
  const at = frame(panel, node, width, found.flatMap((one) => one.x),
    found.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]));
  borders(node, at, payload.runs);
  for (const one of found) {
    const reach = options.reach(one.x.length);
    if (panel.kind === "bars") {
      for (const [place, value] of one.y.entries())
        if (value) svg(node, "line", {x1: at.x(one.x[place]), x2: at.x(one.x[place]),
          y1: at.floor, y2: at.y(value), stroke: one.colour, "stroke-width": 2});
      continue;
    }
    if (one.low) {
      const [low, high] = [one.low, one.high].map((ys) => apart(one.x, ys, reach, payload));
      const back = path([...one.x].reverse(), [...low].reverse(), at, panel.log);
      svg(node, "path", {d: path(one.x, high, at, panel.log) + back.replace("M", "L") + "Z",
        fill: one.colour, "fill-opacity": 0.18});
    }
    const look = {fill: "none", stroke: one.colour, "stroke-dasharray": one.dash};
    if (reach && !one.low) svg(node, "path", {...look, "stroke-opacity": 0.28,
      d: path(one.x, one.y, at, panel.log)});
    one.shown = apart(one.x, one.y, reach, payload);
    svg(node, "path", {...look, "stroke-width": 1.7, d: path(one.x, one.shown, at, panel.log)});
    if (one.x.length <= 30) one.x.forEach((x, place) => {
      if (one.shown[place] !== null && (!panel.log || one.shown[place] > 0))
        svg(node, "circle", {cx: at.x(x), cy: at.y(one.shown[place]), r: 2.2, fill: one.colour});
    });
  }
  return {at, found};
}

// One run's values on top of each other.
function drawStack(panel, node, width, payload, options) {
  const rows = panel.series.filter((one) => one[0] === options.run);
  const xs = [...new Set(rows.flatMap((one) => one[2]))].sort((one, other) => one - other);
  const reach = options.reach(xs.length);
  const found = rows.map(([, label, x, y]) => {
    const known = new Map(x.map((one, place) => [one, y[place]]));
    return {label: panel.labels[label], x: xs, dash: "",
      colour: panel.colours ? panel.colours[label] : `var(--c${label % 8})`,
      shown: apart(xs, xs.map((one) => known.get(one) || 0), reach, payload)};
  });
  const tops = [xs.map(() => 0)];
  for (const one of found) tops.push(tops.at(-1).map((sum, place) => sum + one.shown[place]));
  const at = frame({...panel, limits: [0, null]}, node, width, xs, tops.at(-1));
  found.forEach((one, place) => svg(node, "path", {fill: one.colour, "fill-opacity": 0.85,
    d: path(xs, tops[place + 1], at) + path([...xs].reverse(), [...tops[place]].reverse(), at)
      .replace("M", "L") + "Z"}));
  borders(node, at, [payload.runs[options.run]]);
  return {at, found};
}

// One run: a column a step, a row a label, the fuller the larger the row's share.
function drawMap(panel, node, width, payload, options) {
  const rows = panel.series.filter((one) => one[0] === options.run);
  const xs = rows.length ? rows[0][2] : [];
  const totals = xs.map((_, place) => rows.reduce((sum, one) => sum + one[3][place], 0));
  const at = frame(panel, node, width, xs, [0, 1]);
  const found = rows.map(([, label, x, y]) => ({label: panel.labels[label], x, dash: "",
    shown: y.map((one, place) => totals[place] ? one / totals[place] : null)}));
  const skip = Math.ceil(xs.length / 250), high = (at.floor - SPACE.top) / rows.length;
  for (let place = 0; place < xs.length; place += skip) {
    const next = xs[Math.min(place + skip, xs.length - 1)];
    const wide = Math.max(1, at.x(next) - at.x(xs[place])) + 0.3;
    found.forEach((one, row) => one.shown[place] && svg(node, "rect", {
      x: at.x(xs[place]), width: Math.min(wide, width - SPACE.right - at.x(xs[place]) + 1),
      y: at.floor - (row + 1) * high, height: high, fill: "var(--c0)",
      "fill-opacity": Math.sqrt(one.shown[place]).toFixed(3)}));
  }
  return {at, found: found.filter((one) => one.x.length)};
}

const DRAW = {lines: drawLines, bars: drawLines, stack: drawStack, map: drawMap};

// The values at the step nearest to the pointer, written above the curves.
function readout(node, drawn, panel, line, text) {
  const cursor = svg(node, "line", {class: "cursor", y1: SPACE.top, y2: drawn.at.floor,
    visibility: "hidden"});
  const show = (event) => {
    const box = node.getBoundingClientRect();
    const share = (event.clientX - box.left - SPACE.left) /
      (box.width - SPACE.left - SPACE.right);
    const wanted = drawn.at.low + share * (drawn.at.high - drawn.at.low);
    const all = drawn.found.flatMap((one) => one.x);
    const step = all.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted)
      ? one : best, all[0]);
    cursor.setAttribute("x1", drawn.at.x(step));
    cursor.setAttribute("x2", drawn.at.x(step));
    cursor.setAttribute("visibility", "visible");
    const parts = drawn.found.filter((one) => one.x.includes(step)).map((one) =>
      `${text(one)} ${short((one.shown || one.y)[one.x.indexOf(step)])}`);
    line.textContent = `step ${step}: ${parts.join(" · ")}`;
  };
  node.addEventListener("pointermove", show);
  node.addEventListener("pointerdown", show);
}

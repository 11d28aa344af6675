"use strict";
// Draws the figures of a page from its data: lines, areas, bars and points, with values under the pointer. A click on
// a name of the legend hides its curve; a drag over a figure shows that part of its x axis, a double click all again.
const figures = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const LEFT = 66, RIGHT = 20, TOP = 24, BOTTOM = 38, LANE = 28;
const LOG_FROM = 1000;  // positive values that differ by this factor or more are drawn on a logarithmic axis
const SCALES = {
  bytes: ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"].map((name, power) => [1024 ** power, name]),
  count: ["", "K", "M", "B", "T"].map((name, power) => [1000 ** power, name]),
  seconds: [[1e-6, "µs"], [1e-3, "ms"], [1, "seconds"], [180, "minutes", 60], [10800, "hours", 3600], [259200, "days", 86400]],
  GB: [[1e9, "GB"]],
  percent: [[0.01, "%"]],
};
const SHORT = { seconds: "s", minutes: "min", hours: "h", days: "d" };

function scaled(form, largest) {  // [size of the unit, its name] for values of this size
  const rows = (form === "steps" && largest >= 1e5 ? SCALES.count : SCALES[form]) || [[1, ""]];
  const [from, name, size] = rows.findLast((row) => largest >= row[0]) || rows[0];
  return [size || from, name];
}

function number(value, digits) {
  const size = Math.abs(value), round = Number(value.toPrecision(digits));
  if (size && (size >= 1e7 || size < 1e-3)) return round.toExponential().replace("e+", "e");
  return round.toLocaleString("en", { maximumFractionDigits: 12 });
}

function say(value, axis) {  // a value with its unit
  if (value === null) return "not finite";
  const [size, name] = scaled(axis.form, Math.abs(value));
  if (axis.form === "steps") return "step " + number(value, 15);
  if (axis.form === "count" || axis.form === "plain") return number(value, 6) + (axis.unit.startsWith("no unit") ? "" : " " + axis.unit);
  return number(value / size, 4) + " " + (SHORT[name] || name);
}

function ticks(low, high, count) {  // about so many round numbers in [low, high]
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  if (!(raw > 0 && raw < Infinity && power > 0)) return [];
  const size = [1, 2, 5, 10].map((factor) => power * factor).find((step) => step >= raw) || 10 * power, found = [];
  for (let i = Math.ceil(low / size); i * size <= high && found.length < 20; i += 1) found.push(Number((i * size).toPrecision(12)));
  return found;
}

function scale(values, begins, ends, about, count, isLog) {  // maps values to places, with ticks and their texts
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  isLog = isLog && low > 0 && high / low >= LOG_FROM;
  if (low === high) { const room = Math.abs(low) * 0.05 || 1; low -= room; high += room; }
  const [size, name] = scaled(about.form, Math.max(Math.abs(low), Math.abs(high)));
  const of = isLog ? Math.log10 : (value) => value;
  const map = (value) => begins + (of(value) - of(low)) / (of(high) - of(low)) * (ends - begins);
  map.low = low; map.high = high; map.isLog = isLog;
  map.back = (place) => low + (place - begins) / (ends - begins) * (high - low);
  if (isLog) {
    const first = Math.ceil(Math.log10(low)), powers = Math.floor(Math.log10(high)) - first + 1, every = Math.max(1, Math.floor(powers / 6));
    map.ticks = Array.from({ length: Math.ceil(powers / every) }, (_, i) => Number("1e" + (first + i * every)));
  } else map.ticks = ticks(low / size, high / size, count).map((tick) => Math.min(Math.max(tick * size, low), high));  // it rounds
  if (about.form === "steps") map.ticks = map.ticks.filter(Number.isInteger);
  const letter = SCALES.count.some((row) => row[1] === name) ? name : "", unit = letter ? "" : name;
  for (let digits = 4; digits < 16; digits += 1) {  // as many as it takes to tell the ticks apart
    map.texts = map.ticks.map((tick) => number(tick / size, digits) + letter);
    if (new Set(map.texts).size === map.texts.length) break;
  }
  map.ticks = map.ticks.filter((_, i) => map.texts.indexOf(map.texts[i]) === i);
  map.texts = [...new Set(map.texts)];
  map.unit = about.form === "percent" || !unit ? about.unit : unit + (about.unit === unit || about.form !== "seconds" ? "" : " " + about.unit);
  return map;
}

function add(parent, tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function path(curve, x, y) {  // gaps and crosses where a value is not finite, dots where it stands alone
  let line = "", dots = "", broken = "";
  curve.at.forEach((at, i) => {
    const value = curve.values[i], place = x(at).toFixed(1), before = (curve.values[i - 1] ?? null) !== null;
    if (value === null) { broken += `M${place} ${TOP}m-3 -3l6 6m0 -6l-6 6`; return; }
    line += (before ? "L" : "M") + place + " " + y(value).toFixed(1);
    if (!before && (curve.values[i + 1] ?? null) === null) dots += `M${place} ${y(value).toFixed(1)}h.01`;
  });
  return [line, dots, broken];
}

function stacked(curves) {  // the upper edge of each area, on top of those before it
  let below = null;
  return curves.map((curve) => {
    if (curve.kind !== "area") return curve;
    const under = below || curve.values.map(() => 0);
    below = curve.values.map((value, i) => value + under[i]);
    return { ...curve, values: below, under, own: curve.values };
  });
}

function draw(chart, svg, state) {
  const wide = Math.max(svg.parentNode.clientWidth, 200), high = chart.lanes.length ? TOP + chart.lanes.length * LANE + BOTTOM : chart.is_wide ? 320 : 240;
  const bottom = high - BOTTOM, curves = stacked(chart.curves.filter((_, i) => !state.hidden.has(i)));
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  svg.replaceChildren();
  const isBars = chart.lanes.length > 0, [from, to] = state.zoom || [-Infinity, Infinity];
  const alike = figures.filter((one) => one.x.unit === chart.x.unit).flatMap((one) => one.curves);  // they can be compared
  const places = alike.flatMap((curve) => curve.lanes ? [...curve.at, ...curve.values] : curve.at).concat(chart.limits.filter((row) => row[0] === "x").map((row) => row[1]));
  const whole = state.zoom ? [from, to] : extremes([...places, ...(chart.x.from_zero ? [0] : [])]);
  const x = scale(whole, LEFT, wide - RIGHT, chart.x, Math.max(2, Math.min(8, Math.floor(wide / 90))), false);
  const seen = isBars ? [] : extremes(curves.flatMap((curve) => curve.values.filter((value, i) => value !== null && curve.at[i] >= from && curve.at[i] <= to)));
  const limits = chart.limits.filter((row) => row[0] === "y").map((row) => row[1]).filter((value) => value < 4 * Math.max(...seen));
  const isLog = seen.length && seen[0] > 0 && seen[1] / seen[0] >= LOG_FROM && !chart.y.from_zero;
  const range = extremes([...seen, ...limits, ...(chart.y.from_zero ? [0] : [])]), room = isLog || !range.length ? 0 : 0.05 * (range[1] - range[0]);
  const y = scale(range.map((value, i) => i ? value + room : chart.y.from_zero ? value : value - room), bottom, TOP, chart.y, 5, true);
  if (isBars) { y.ticks = []; y.texts = []; y.unit = chart.y.unit; }
  y.ticks.forEach((tick, i) => {
    add(svg, "line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(tick), y2: y(tick) });
    add(svg, "text", { class: "value", x: LEFT - 6, y: y(tick) + 4 }, y.texts[i]);
  });
  x.ticks.forEach((tick, i) => add(svg, "text", { class: "step", x: x(tick), y: bottom + 15 }, x.texts[i]));
  add(svg, "text", { class: "unit", x: 4, y: 12 }, y.unit + (y.isLog ? " (logarithmic)" : ""));
  add(svg, "text", { class: "unit along", x: (LEFT + wide - RIGHT) / 2, y: high - 5 }, x.unit);
  const inside = add(svg, "svg", { x: LEFT - 4, y: 0, width: wide - LEFT - RIGHT + 8, height: high, viewBox: `${LEFT - 4} 0 ${wide - LEFT - RIGHT + 8} ${high}` });
  chart.lanes.forEach((name, lane) => {
    add(svg, "text", { class: "value", x: LEFT - 6, y: TOP + lane * LANE + 13 }, name);
    add(inside, "rect", { class: "idle", x: LEFT, y: TOP + lane * LANE, width: wide - LEFT - RIGHT, height: 18 });
  });
  chart.marks.forEach(([kind, steps]) => steps.forEach((at) => add(inside, "line", { class: "mark " + kind, x1: x(at), x2: x(at), y1: TOP, y2: bottom })));
  let drawn = 0;
  curves.forEach((curve) => {
    let line = "", dots = "", broken = "", filled = "";
    if (curve.kind === "bars") curve.at.forEach((begin, i) => {
      const lane = curve.lanes[i], top = TOP + Math.floor(lane) * LANE + (lane % 1 ? 19 : 0);  // half a lane: beside its work
      filled += `M${x(begin).toFixed(2)} ${top}H${x(curve.values[i]).toFixed(2)}v${lane % 1 ? 5 : 18}H${x(begin).toFixed(2)}z`;
    });
    else if (curve.kind === "points") curve.at.forEach((at, i) => { filled += `M${x(at) - 5} ${y(curve.values[i])}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`; });
    else [line, dots, broken] = path(curve, x, y);
    if (curve.kind === "area") {
      filled = line + curve.at.map((at, i) => [at, curve.under[i]]).reverse().map(([at, value]) => `L${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("") + "Z";
      line = "";
    }
    for (const [kind, d] of [["area c", filled], ["curve c", line], ["dots c", dots]]) if (d) add(inside, "path", { class: kind + curve.colour, "data-name": curve.name, d });
    if (broken) add(add(inside, "path", { class: "broken", d: broken }), "title", {}, "not finite");
    drawn += line || filled || dots ? 1 : 0;
  });
  chart.limits.forEach(([axis, value, text]) => {
    const map = axis === "x" ? x : y;
    if (value < map.low || value > map.high) return;
    add(inside, "line", { class: "limit", ...(axis === "x" ? { x1: x(value), x2: x(value), y1: TOP, y2: bottom } : { x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value) }) });
    add(inside, "text", axis === "x" ? { class: "value", x: x(value) - 4, y: TOP + 10 } : { class: "value", x: wide - RIGHT - 4, y: y(value) - 4 }, text);
  });
  return { x, y, curves, drawn, cursor: add(inside, "line", { class: "cursor", y1: TOP, y2: bottom }), wide };
}

function extremes(values) {  // [] without one; a spread of many values would be too many arguments
  return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [];
}

function nearest(places, wanted) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] > wanted) high = middle; else low = middle;
  }
  return Math.abs(places[high] - wanted) < Math.abs(places[low] - wanted) ? high : low;
}

function under(chart, view, px, py) {  // [place for the cursor or null, lines of text] of what lies under the pointer
  const at = view.x.back(px), lane = Math.floor((py - TOP) / LANE) + ((py - TOP) % LANE > 18 ? 0.5 : 0);
  for (const curve of view.curves) {
    const far = (i) => Math.hypot(view.x(curve.at[i]) - px, view.y(curve.values[i]) - py);
    const found = curve.kind === "bars" ? curve.at.findIndex((begin, i) => curve.lanes[i] === lane && begin <= at && at <= curve.values[i])
      : curve.kind === "points" ? curve.at.findIndex((_, i) => far(i) < 9) : -1;
    if (found >= 0) return [null, [curve.texts ? curve.texts[found] : curve.name]];
  }
  const curves = view.curves.filter((curve) => (curve.kind === "line" || curve.kind === "area") && curve.at.length && !chart.limits.some((row) => row[0] === "x"));
  if (!curves.length) return [null, []];
  const here = curves[0].at[nearest(curves[0].at, at)];
  return [here, [say(here, chart.x), ...curves.map((curve) => {
    const i = nearest(curve.at, at), place = curve.at[i];
    return `${curve.name}  ${say((curve.own || curve.values)[i], chart.y)}${place === here ? "" : `  (${say(place, chart.x)})`}`;
  })]];
}

function setUp(box) {
  const chart = figures[Number(box.dataset.figure)], state = { hidden: new Set(), zoom: null };
  chart.is_wide = box.parentNode.classList.contains("wide");
  const legend = document.createElement("ul"), svg = add(box, "svg", { role: "presentation" });
  let view, pressed = null;
  const again = () => { view = draw(chart, svg, state); };
  if (chart.curves.length > 1) {
    legend.className = "legend";
    chart.curves.forEach((curve, i) => {
      const name = legend.appendChild(document.createElement("li"));
      name.className = "c" + curve.colour;
      name.textContent = curve.name;
      name.addEventListener("click", () => {
        name.classList.toggle("hidden", !state.hidden.delete(i));
        if (name.classList.contains("hidden")) state.hidden.add(i);
        again();
      });
    });
    box.before(legend);
  }
  const place = (event) => {
    const here = svg.getBoundingClientRect();
    return [(event.clientX - here.left) / here.width * view.wide, (event.clientY - here.top) / here.width * view.wide];
  };
  svg.addEventListener("pointerdown", (event) => { pressed = place(event)[0]; });
  svg.addEventListener("pointerup", (event) => {
    const ends = [pressed, place(event)[0]].map((at) => view.x.back(at)).sort((a, b) => a - b);
    if (pressed !== null && Math.abs(place(event)[0] - pressed) > 10) { state.zoom = ends; again(); }
    pressed = null;
  });
  svg.addEventListener("dblclick", () => { state.zoom = null; again(); });
  svg.addEventListener("pointermove", (event) => {
    const [here, lines] = under(chart, view, ...place(event));
    tip.hidden = !lines.length;
    view.cursor.style.visibility = here === null ? "hidden" : "visible";
    if (here !== null) for (const end of ["x1", "x2"]) view.cursor.setAttribute(end, view.x(here));
    tip.textContent = lines.join("\n");
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; pressed = null; view.cursor.style.visibility = "hidden"; });
  window.addEventListener("resize", again);
  again();
  return view.drawn;
}

document.documentElement.dataset.drawn = String([...document.querySelectorAll(".drawing")].reduce((sum, box) => sum + setUp(box), 0));

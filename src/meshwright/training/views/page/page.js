"use strict";
// Tells the values under the pointer; the curves themselves are drawn without this.
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function text(value, chart) {
  if (value === null) return "not finite";
  if (chart.scale === "bytes") return (value / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 }) + " MiB";
  if (chart.scale === "percent") return (100 * value).toFixed(1) + " %";
  const plain = Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(6)));
  return chart.unit.startsWith("no unit") ? plain : plain + " " + chart.unit;
}

function place(at, chart) {
  if (chart.by === "optimizer steps") return "step " + at.toLocaleString("en");
  if (chart.by === "tokens trained on") return at.toLocaleString("en") + " tokens";
  return at.toLocaleString("en", { maximumFractionDigits: 1 }) + " s of training";
}

function nearest(places, wanted) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] > wanted) high = middle; else low = middle;
  }
  return Math.abs(places[high] - wanted) < Math.abs(places[low] - wanted) ? high : low;
}

let drawn = 0;
document.querySelectorAll("figure").forEach((figure, number) => {
  const chart = charts[number], svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const [low, high, begins, ends] = chart.x;
  figure.querySelectorAll(".curve, .dots").forEach((path) => { if (path.getTotalLength() > 0) drawn += 1; });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pointed = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = low + (pointed - begins) / (ends - begins) * (high - low);
    const curves = chart.curves.filter((curve) => curve.at.length);
    if (!curves.length) return;
    const here = curves[0].at[nearest(curves[0].at, wanted)];
    const lines = curves.map((curve) => {
      const at = nearest(curve.at, wanted);
      return curve.name + "  " + text(curve.values[at], chart) + (curve.at[at] === here ? "" : "  (" + place(curve.at[at], chart) + ")");
    });
    const x = begins + (here - low) / (high - low) * (ends - begins);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    tip.textContent = [place(here, chart), ...lines].join("\n");
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.style.visibility = "hidden"; });
});
document.documentElement.dataset.drawn = String(drawn);

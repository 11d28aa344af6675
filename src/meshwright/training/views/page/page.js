"use strict";
// Tells the values under the pointer; the curves themselves are drawn without this.
const charts = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function text(value, unit) {
  if (value === null) return "not finite";
  if (unit === "bytes") return (value / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 }) + " MiB";
  if (unit === "percent") return (100 * value).toFixed(1) + " %";
  if (unit === "seconds") return value.toPrecision(3) + " s";
  return Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(6)));
}

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] > wanted) high = middle; else low = middle;
  }
  return Math.abs(steps[high] - wanted) < Math.abs(steps[low] - wanted) ? high : low;
}

let drawn = 0;
document.querySelectorAll("figure").forEach((figure, number) => {
  const chart = charts[number], svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const [low, high, begins, ends] = chart.x;
  figure.querySelectorAll(".curve, .dots").forEach((path) => { if (path.getTotalLength() > 0) drawn += 1; });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = low + (place - begins) / (ends - begins) * (high - low);
    const curves = chart.curves.filter((curve) => curve.steps.length);
    if (!curves.length) return;
    const step = curves[0].steps[nearest(curves[0].steps, wanted)];
    const lines = curves.map((curve) => {
      const at = nearest(curve.steps, wanted);
      return curve.name + "  " + text(curve.values[at], chart.unit) + (curve.steps[at] === step ? "" : "  (step " + curve.steps[at] + ")");
    });
    const x = begins + (step - low) / (high - low) * (ends - begins);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    tip.textContent = ["step " + step.toLocaleString("en"), ...lines].join("\n");
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(0, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.style.visibility = "hidden"; });
});
document.documentElement.dataset.drawn = String(drawn);

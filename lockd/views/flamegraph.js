// Zoom, search, and the fit to the window for the picture that views/flamegraph.py makes. The picture can also be
// read without this script.
"use strict";
(() => {
  const svg = document.querySelector("svg.flamegraph");
  const details = svg.querySelector("#details"), matched = svg.querySelector("#matches");
  const reset = svg.querySelector("#reset"), search = svg.querySelector("input");
  const drawn = svg.width.baseVal.value, margin = 10, padding = 3, near = 0.002;
  const frames = [...svg.querySelectorAll("#frames > g")].map((group) => {
    const rect = group.querySelector("rect"), about = group.querySelector("title").textContent;
    const left = +rect.getAttribute("x") - margin, width = +rect.getAttribute("width");
    return {
      group, rect, about, text: group.querySelector("text"), name: about.split("\n")[0],
      left, right: left + width, row: +rect.getAttribute("y"),
    };
  });
  const all = frames[0];
  if (!all) return;
  let shown = all;

  const isAbove = (frame, other) =>
    frame.row < other.row && frame.left <= other.left + near && frame.right >= other.right - near;

  function clipped(name, room, letter) {
    const letters = Math.floor((room - 2 * padding) / letter);
    return letters >= name.length ? name : letters < 3 ? "" : name.slice(0, letters - 1) + "…";
  }

  function draw() {
    const width = Math.max(document.documentElement.clientWidth || drawn, 400);
    svg.setAttribute("width", width);
    for (const right of svg.querySelectorAll("[data-right]"))
      right.setAttribute("x", width - right.dataset.right);
    const scale = (width - 2 * margin) / (shown.right - shown.left);
    const letter = details.getComputedTextLength() / details.textContent.length || 6.6;
    for (const frame of frames) {
      const isWhole = frame === shown || isAbove(frame, shown);
      const isPart = frame === shown || isAbove(shown, frame);
      frame.group.style.display = isWhole || isPart ? "" : "none";
      if (!isWhole && !isPart) continue;
      const left = isWhole ? margin : margin + (frame.left - shown.left) * scale;
      const room = isWhole ? width - 2 * margin : (frame.right - frame.left) * scale;
      frame.rect.setAttribute("x", left);
      frame.rect.setAttribute("width", Math.max(room, 0.1));
      frame.group.classList.toggle("above", frame !== shown && isWhole);
      frame.text.setAttribute("x", left + padding);
      frame.text.textContent = clipped(frame.name, room, letter);
    }
    reset.style.visibility = shown === all ? "hidden" : "visible";
  }

  function zoom(frame) {
    shown = frame;
    draw();
  }

  function matcher(text) {
    try {
      const pattern = new RegExp(text, "i");
      return (name) => pattern.test(name);
    } catch {
      return (name) => name.toLowerCase().includes(text.toLowerCase());
    }
  }

  function markMatches() {
    const matches = search.value ? matcher(search.value) : () => false;
    let sum = 0, counted = 0;
    // Outer frames come first. A frame inside of a matching frame is already counted with it.
    for (const frame of frames) frame.group.classList.toggle("match", matches(frame.name));
    const matching = frames.filter((frame) => frame.group.classList.contains("match"));
    for (const frame of matching.sort((a, b) => a.left - b.left || a.row - b.row)) {
      if (frame.left < counted - near) continue;
      sum += frame.right - frame.left;
      counted = frame.right;
    }
    const share = (100 * sum) / (all.right - all.left);
    matched.textContent = search.value ? `${share.toFixed(2)} % match` : "";
  }

  const showDetails = (frame) => (details.textContent = frame.about.replace("\n", ": "));
  for (const frame of frames) {
    frame.group.addEventListener("click", () => zoom(frame));
    frame.group.addEventListener("mouseenter", () => showDetails(frame));
  }
  svg.querySelector("#frames").addEventListener("mouseleave", () => showDetails(shown));
  reset.addEventListener("click", () => zoom(all));
  search.addEventListener("input", markMatches);
  window.addEventListener("resize", draw);
  window.addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(all);
    if (event.key === "/" && event.target !== search) {
      event.preventDefault();
      search.focus();
    }
  });
  showDetails(all);
  draw();
})();

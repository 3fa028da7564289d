// Values of the curves at the pointer, from `data-hover`: points are [step, value, x, y] in units of the drawing.
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const lines = JSON.parse(figure.dataset.hover), svg = figure.querySelector("svg");
  const tip = figure.appendChild(document.createElement("div"));
  const marks = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
  const draw = (name, attributes) => {
    const mark = marks.appendChild(document.createElementNS(svg.namespaceURI, name));
    for (const [key, value] of Object.entries(attributes)) mark.setAttribute(key, value);
  };
  const hide = () => { tip.hidden = true; marks.replaceChildren(); };
  tip.className = "tip";
  tip.setAttribute("aria-hidden", "true");
  hide();
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), { width, height } = svg.viewBox.baseVal;
    const x = (event.clientX - box.left) / box.width * width;
    const nearer = (a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a;
    const points = lines.map(line => line.points.reduce(nearer)), at = points.reduce(nearer);
    hide();
    draw("line", { x1: at[2], x2: at[2], y1: 0, y2: height, class: "cursor" });
    tip.replaceChildren(`step ${at[0].toLocaleString("en")}`);
    lines.forEach((line, number) => {
      const [step, value, left, top] = points[number];
      if (Math.abs(left - at[2]) > width / 60) return;
      draw("circle", { cx: left, cy: top, r: 3.2, class: line.colour });
      const row = tip.appendChild(document.createElement("span"));
      row.className = line.colour;
      row.textContent = `${line.label} ${value}` + (step === at[0] ? "" : ` at ${step}`);
    });
    tip.hidden = false;
    // A wide drawing scrolls within its figure: the tip stays in view.
    const seen = figure.scrollLeft, room = seen + figure.clientWidth - tip.offsetWidth - 8;
    const place = at[2] / width * box.width + box.left - figure.getBoundingClientRect().left + seen;
    tip.style.left = `${Math.max(seen + 8, place + 12 > room ? Math.min(room, place - tip.offsetWidth - 12) : place + 12)}px`;
  });
  svg.addEventListener("pointerleave", hide);
}

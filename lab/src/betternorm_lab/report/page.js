// Draws the charts of the page and lets them be read off: by pointer, by arrow keys, and by slider.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = {};

  for (const [id, figure] of Object.entries(data.charts)) {
    charts[id] = makeChart(document.getElementById(id), figure);
  }
  for (const [id, panel] of Object.entries(data.panels)) {
    makeSlider(document.getElementById(id), panel);
  }

  // A chart on the page -------------------------------------------------------------------------------------------

  function makeChart(box, figure) {
    const tip = box.parentElement.querySelector(".tip");
    const chart = { figure, pinned: null };
    let drawing = null;
    let current = -1;

    chart.draw = () => {
      if (!box.clientWidth) return;
      drawing = figure.bars ? drawBars(box.clientWidth, figure) : drawLines(box.clientWidth, figure, chart.pinned);
      box.replaceChildren(drawing.svg);
      read(-1);
    };

    function read(position) {
      current = position;
      drawing.marks.replaceChildren();
      tip.replaceChildren();
      if (position < 0) return;
      drawing.mark(position);
      const x = figure.positions[position];
      tip.append(element("b", {}, figure.bars ? x : `${figure.xLabel} ${format(x)}`));
      for (const series of figure.series) {
        const point = series.x.indexOf(x);
        if (point < 0 || series.y[point] === null) continue;
        const words = element("span", { class: series.colour });
        words.append(element("i"), element("em", {}, `${series.name}: ${measured(series, point)}`));
        tip.append(words);
      }
      const [left, top] = drawing.place(position);
      const beside = left + 14 + tip.offsetWidth <= box.clientWidth ? left + 14 : left - 14 - tip.offsetWidth;
      tip.style.transform = `translate(${Math.max(0, beside)}px, ${top}px)`;
    }

    box.addEventListener("pointermove", (event) => {
      const frame = box.getBoundingClientRect();
      read(drawing.nearest(event.clientX - frame.left, event.clientY - frame.top));
    });
    box.addEventListener("pointerleave", () => read(-1));
    box.addEventListener("blur", () => read(-1));
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") read(-1);
      if (!step) return;
      event.preventDefault();
      read(Math.min(figure.positions.length - 1, Math.max(0, current + step)));
    });
    new ResizeObserver(chart.draw).observe(box);
    chart.draw();
    return chart;
  }

  function measured(series, point) {
    const interval = series.low && series.low[point] !== null && series.high && series.high[point] !== null;
    return format(series.y[point]) + (interval ? ` (${format(series.low[point])} to ${format(series.high[point])})` : "");
  }

  // Curves ---------------------------------------------------------------------------------------------------------

  function drawLines(width, figure, pinned) {
    const values = figure.series.flatMap((series) => [...series.y, ...(series.low || []), ...(series.high || [])]);
    const range = extent([...values, ...figure.levels], 0.06);
    const ticks = niceTicks(range, 7);
    const labels = ticks.map(format);
    const frame = {
      left: 14 + 7 * Math.max(...labels.map((label) => label.length)),
      right: width - 14,
      top: 10,
      bottom: Math.round(Math.min(320, Math.max(190, width * 0.5))),
    };
    const y = scale(range, [frame.bottom, frame.top]);
    const x = horizontal(figure, frame);
    const svg = makeSvg(width, frame.bottom + 24);

    ticks.forEach((tick, number) => {
      svg.append(line("grid", frame.left, y(tick), frame.right, y(tick)));
      svg.append(text("", frame.left - 8, y(tick) + 4, labels[number], "end"));
    });
    for (const tick of xTicks(figure, x, frame)) {
      svg.append(line("base", x(tick), frame.bottom, x(tick), frame.bottom + 4));
      svg.append(text("", x(tick), frame.bottom + 18, format(tick), "middle"));
    }
    svg.append(line("base", frame.left, frame.bottom, frame.right, frame.bottom));
    const few = figure.positions.length <= 40;
    for (const series of figure.series) {
      const group = make("g", { class: series.colour });
      if (series.low && series.high) {
        for (const run of runs(series, (i) => series.low[i] !== null && series.high[i] !== null)) {
          const upper = run.map((i) => `${x(series.x[i])},${y(series.high[i])}`);
          const lower = run.map((i) => `${x(series.x[i])},${y(series.low[i])}`).reverse();
          group.append(make("polygon", { class: "band", points: [...upper, ...lower].join(" ") }));
          const [at, i] = [x(series.x[run[0]]), run[0]];
          if (run.length === 1) group.append(line("whisker", at, y(series.low[i]), at, y(series.high[i])));
        }
      }
      for (const run of runs(series, (i) => series.y[i] !== null)) {
        const points = run.map((i) => `${x(series.x[i])},${y(series.y[i])}`).join(" ");
        group.append(make("polyline", { class: "curve", points, "stroke-dasharray": series.dash }));
        if (few || run.length === 1) {
          group.append(...run.map((i) => make("circle", { class: "point", cx: x(series.x[i]), cy: y(series.y[i]), r: 3 })));
        }
      }
      svg.append(group);
    }
    for (const level of figure.levels.filter((item) => item !== null)) {
      svg.append(line("level", frame.left, y(level), frame.right, y(level)));
    }
    if (pinned !== null) svg.append(line("pinned", x(pinned), frame.top, x(pinned), frame.bottom));
    const marks = make("g");
    svg.append(marks);

    return {
      svg,
      marks,
      nearest: (left) => argmin(figure.positions.map((position) => Math.abs(x(position) - left))),
      place: (position) => [x(figure.positions[position]), frame.top],
      mark(position) {
        const at = figure.positions[position];
        marks.append(line("reader", x(at), frame.top, x(at), frame.bottom));
        for (const series of figure.series) {
          const point = series.x.indexOf(at);
          if (point < 0 || series.y[point] === null) continue;
          const circle = make("circle", { class: `reading ${series.colour}`, cx: x(at), cy: y(series.y[point]), r: 5 });
          marks.append(circle);
        }
      },
    };
  }

  // Left to right. On a logarithmic axis zero has no place of its own: it stands one step left of the smallest.
  function horizontal(figure, frame) {
    const all = figure.positions;
    if (!figure.logX) return scale(extent(all, 0), [frame.left + 6, frame.right - 6]);
    const logs = all.filter((value) => value > 0).map(Math.log);
    const [low, high] = extent(logs, 0);
    const start = all[0] > 0 ? low : low - Math.max(0.15 * (high - low), 0.1);
    const place = scale([start, high], [frame.left + 6, frame.right - 6]);
    return (value) => place(value > 0 ? Math.log(value) : start);
  }

  // The measured places themselves where they are few and lie apart, round numbers otherwise.
  function xTicks(figure, x, frame) {
    const all = figure.positions;
    const apart = all.every((value, i) => !i || x(value) - x(all[i - 1]) > 7 * format(value).length + 8);
    if (apart && all.length <= 12) return all;
    const [low, high] = [all[0], all[all.length - 1]];
    if (!figure.logX) {
      return niceTicks([low, high], Math.max(2, Math.floor((frame.right - frame.left) / 80)));
    }
    const ticks = low > 0 ? [] : [low];
    const smallest = all.find((value) => value > 0) || 1;
    for (let power = Math.floor(Math.log10(smallest)); 10 ** power <= high; power++) {
      for (const digit of [1, 2, 5]) {
        const tick = Number(`${digit}e${power}`);
        if (tick < smallest || tick > high) continue;
        if (!ticks.length || x(tick) - x(ticks[ticks.length - 1]) > 44) ticks.push(tick);
      }
    }
    return ticks;
  }

  // The stretches of points without a gap.
  function runs(series, known) {
    const found = [[]];
    series.x.forEach((_, i) => (known(i) ? found[found.length - 1].push(i) : found.push([])));
    return found.filter((run) => run.length);
  }

  // Bars, lying on their side so that names of any length can be read ----------------------------------------------

  function drawBars(width, figure) {
    const thick = 18;
    const high = 24 + thick * figure.series.length + 8;
    const values = figure.series.flatMap((series) => [...series.y, ...(series.low || []), ...(series.high || [])]);
    const all = [...values, ...figure.levels, ...(figure.fromZero ? [0] : [])];
    const range = extent(all, figure.fromZero ? 0 : 0.06);
    const ticks = niceTicks(range, Math.max(3, Math.floor(width / 110)));
    const frame = { left: 8, right: width - 56, top: 4, bottom: 4 + high * figure.positions.length };
    const x = scale(range, [frame.left + 6, frame.right - 6]);
    const svg = makeSvg(width, frame.bottom + 24);

    for (const tick of ticks) {
      svg.append(line("grid", x(tick), frame.top, x(tick), frame.bottom));
      svg.append(text("", x(tick), frame.bottom + 18, format(tick), "middle"));
    }
    if (figure.fromZero) svg.append(line("base", x(0), frame.top, x(0), frame.bottom));
    for (const level of figure.levels.filter((item) => item !== null)) {
      svg.append(line("level", x(level), frame.top, x(level), frame.bottom));
    }
    const marks = make("g");
    svg.append(marks);
    figure.positions.forEach((position, row) => {
      const top = frame.top + row * high;
      svg.append(text("category", frame.left + 14, top + 16, position, "start"));
      figure.series.forEach((series, number) => {
        const i = series.x.indexOf(position);
        if (i < 0 || series.y[i] === null) return;
        const group = make("g", { class: series.colour });
        const middle = top + 24 + thick * (number + 0.5);
        const [from, to] = [x(0), x(series.y[i])];
        let end = to;
        if (figure.fromZero) {
          const box = { x: Math.min(from, to), y: middle - 6, width: Math.abs(to - from), height: 12, rx: 2 };
          group.append(make("rect", { class: "bar", ...box }));
        } else {
          group.append(make("circle", { class: "point", cx: to, cy: middle, r: 5 }));
        }
        if (series.low && series.high && series.low[i] !== null && series.high[i] !== null) {
          const [low, up] = [x(series.low[i]), x(series.high[i])];
          group.append(line("whisker", low, middle, up, middle));
          group.append(line("whisker", low, middle - 4, low, middle + 4), line("whisker", up, middle - 4, up, middle + 4));
          end = Math.max(end, up);
        }
        group.append(text("value", Math.max(end, figure.fromZero ? from : end) + 8, middle + 4, format(series.y[i]), "start"));
        svg.append(group);
      });
    });

    return {
      svg,
      marks,
      nearest: (_, top) => Math.min(figure.positions.length - 1, Math.max(0, Math.floor((top - frame.top) / high))),
      place: (position) => [width / 2, frame.top + (position + 1) * high],
      mark(position) {
        const box = { x: 0, y: frame.top + position * high, width, height: high, rx: 4 };
        marks.append(make("rect", { class: "row-reader", ...box }));
      },
    };
  }

  // The slider of a panel: what every series is at one x -------------------------------------------------------------

  function makeSlider(box, panel) {
    const input = box.querySelector("input");
    const output = box.querySelector("output");
    const note = box.querySelector(".between");
    const rows = [...box.querySelectorAll(".readings tbody tr")];

    function move() {
      const x = panel.positions[Number(input.value)];
      output.textContent = format(x);
      input.setAttribute("aria-valuetext", format(x));
      let anyBetween = false;
      panel.charts.forEach((id, column) => {
        const chart = charts[id];
        chart.pinned = x;
        chart.draw();
        for (const row of rows) {
          const series = chart.figure.series.find((item) => item.name === row.cells[0].textContent);
          const { value, between } = series ? at(series, x) : { value: null, between: false };
          anyBetween ||= between;
          row.cells[column + 1].textContent = value === null ? "–" : (between ? "≈ " : "") + format(value);
        }
      });
      note.classList.toggle("shown", anyBetween);
    }

    input.addEventListener("input", move);
    move();
  }

  // The value of a series at x, on the straight line between its neighbours where it was not measured there.
  function at(series, x) {
    const point = series.x.indexOf(x);
    if (point >= 0) return { value: series.y[point], between: false };
    const known = series.x.map((place, i) => [place, series.y[i]]).filter(([, value]) => value !== null);
    const below = known.filter(([place]) => place < x).sort((a, b) => b[0] - a[0])[0];
    const above = known.filter(([place]) => place > x).sort((a, b) => a[0] - b[0])[0];
    if (!below || !above) return { value: null, between: false };
    const share = (x - below[0]) / (above[0] - below[0]);
    return { value: below[1] + share * (above[1] - below[1]), between: true };
  }

  // Small tools ------------------------------------------------------------------------------------------------------

  function format(value) {
    if (typeof value !== "number") return String(value);
    return String(Number(value.toPrecision(4))).replace("-", "−");
  }

  function scale([from, to], [start, end]) {
    return (value) => start + ((value - from) / (to - from || 1)) * (end - start);
  }

  function extent(values, padding) {
    const known = values.filter((value) => value !== null);
    const low = Math.min(...known, known.length ? Infinity : 0);
    const high = Math.max(...known, known.length ? -Infinity : 1);
    const extra = high > low ? (high - low) * padding : Math.abs(high) * 0.05 || 1;
    return padding || high === low ? [low - extra, high + extra] : [low, high];
  }

  // Round numbers inside an interval, about so many.
  function niceTicks([low, high], about) {
    const rough = (high - low) / about || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
    const ticks = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
      ticks.push(Number((number * step).toPrecision(12)));
    }
    return ticks;
  }

  function argmin(values) {
    return values.indexOf(Math.min(...values));
  }

  function makeSvg(width, height) {
    return make("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  }

  function line(style, x1, y1, x2, y2) {
    return make("line", { class: style, x1, y1, x2, y2 });
  }

  function text(style, x, y, words, anchor) {
    const made = make("text", { class: style, x, y, "text-anchor": anchor });
    made.textContent = words;
    return made;
  }

  function make(tag, attributes = {}) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function element(tag, attributes = {}, words = "") {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = words;
    return made;
  }
})();

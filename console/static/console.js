"use strict";
// Runs on every page, and on each part of a page that htmx loads.
(() => {
  const shown = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const two = (number) => String(number).padStart(2, "0");

  // Times in the viewer's zone.
  function times(part) {
    for (const time of part.querySelectorAll("time[datetime]:not([data-local])")) {
      time.dataset.local = "";
      time.title = time.textContent;
      time.textContent = shown.format(new Date(time.dateTime));
    }
    // Beside a field with a UTC time, show a field in the viewer's zone, which sets the first.
    for (const field of part.querySelectorAll("input[data-when]:not([hidden])")) {
      const local = field.cloneNode();
      local.type = "datetime-local";
      local.removeAttribute("name");
      const at = new Date(field.value);
      local.value = isNaN(at) ? "" :
        `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}T${two(at.getHours())}:${two(at.getMinutes())}`;
      local.addEventListener("change", () => { field.value = local.value && new Date(local.value).toISOString(); });
      field.hidden = true;
      field.removeAttribute("id");
      field.after(local);
    }
  }

  // Charts. An element's `data-chart` is {kind: "lines", x: [seconds], series: [{name, values, low,
  // high, dashed}], marks: [{x, label}], range, small}, or the bars of a histogram, of which a range
  // can be chosen: {kind: "histogram", low, high, values}.
  const drawn = new Map();

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    return { ink: of("dim"), grid: of("line"), lines: [1, 2, 3, 4, 5, 6].map((n) => of(`c${n}`)) };
  }

  function axis(colour, more) {
    return {
      stroke: colour.ink, font: "11px system-ui, sans-serif", size: 46,
      grid: { stroke: colour.grid, width: 1 }, ticks: { stroke: colour.grid, width: 1, size: 4 }, ...more,
    };
  }

  function lines(spec, colour) {
    const data = [spec.x];
    const series = [{}];
    const bands = [];
    spec.series.forEach((one, n) => {
      const stroke = colour.lines[n % colour.lines.length];
      data.push(one.values);
      series.push({
        label: one.name, stroke, width: 2, spanGaps: true, dash: one.dashed ? [5, 4] : [],
        points: { show: true, size: 4, fill: stroke },
      });
      if (!one.low) return;
      data.push(one.high, one.low);
      for (const side of ["high", "low"]) {
        series.push({ label: `${one.name} ${side}`, stroke: "transparent", points: { show: false }, spanGaps: true });
      }
      bands.push({ series: [data.length - 2, data.length - 1], fill: stroke + "26" });
    });
    const marks = (u) => {
      const { ctx, bbox } = u;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour.ink;
      ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
      let free = -Infinity;
      for (const mark of spec.marks || []) {
        const x = u.valToPos(mark.x, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.globalAlpha = 0.35;
        ctx.fillRect(x, bbox.top, devicePixelRatio, bbox.height);
        if (x < free) continue;
        ctx.globalAlpha = 1;
        ctx.fillText(mark.label, x + 3, bbox.top + 10 * devicePixelRatio);
        free = x + ctx.measureText(mark.label).width + 8;
      }
      ctx.restore();
    };
    // A small one has values where the pointer is, in all of a page at the same time.
    const cursor = { drag: { x: false, y: false }, ...(spec.small && { sync: { key: "x" } }) };
    return [{
      height: spec.small ? 150 : 210, series, bands, legend: { show: Boolean(spec.small) }, cursor,
      axes: [axis(colour, { size: 38, space: 64 }), axis(colour, { size: 56 })],
      // A single time has an hour around it, not years; a single value as much as itself.
      scales: {
        x: { range: (_, first, last) => (first === last ? [first - 1800, last + 1800] : [first, last]) },
        y: {
          range: spec.range || ((_, low, high) => {
            const around = Math.abs(low) || 1;
            return low === high ? [low - around, low + around] : uPlot.rangeNum(low, high, 0.1, true);
          }),
        },
      },
      hooks: { draw: [marks] },
    }, data];
  }

  function histogram(spec, colour) {
    const width = (spec.high - spec.low) / spec.values.length;
    const x = spec.values.map((_, n) => spec.low + width * (n + 0.5));
    const choose = (u) => {
      if (u.select.width < 4) return;
      const address = new URL(location);
      const at = (left) => Number(u.posToVal(left, "x").toPrecision(3));
      address.searchParams.set("low", Math.max(spec.low, at(u.select.left)));
      address.searchParams.set("high", Math.min(spec.high, at(u.select.left + u.select.width)));
      address.searchParams.delete("before");
      location.assign(address);
    };
    return [{
      height: 150, legend: { show: false },
      series: [{}, { stroke: colour.lines[0], fill: colour.lines[0] + "99", points: { show: false }, paths: uPlot.paths.bars({ size: [0.92, 100] }) }],
      axes: [axis(colour, { size: 38, space: 64 }), axis(colour)],
      scales: { x: { time: false, range: [spec.low, spec.high] }, y: { range: (_, __, most) => [0, most || 1] } },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } }, hooks: { setSelect: [choose] },
    }, [x, spec.values]];
  }

  function draw(element) {
    drawn.get(element)?.destroy();
    const spec = JSON.parse(element.dataset.chart);
    const [options, data] = (spec.kind === "histogram" ? histogram : lines)(spec, colours());
    drawn.set(element, new uPlot({ width: element.clientWidth, ...options }, data, element));
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const chart = drawn.get(target);
      if (chart && Math.round(contentRect.width) !== chart.width) {
        chart.setSize({ width: Math.round(contentRect.width), height: chart.height });
      }
    }
  });

  function charts(part) {
    for (const element of drawn.keys()) if (!element.isConnected) drawn.delete(element);
    for (const element of part.querySelectorAll("[data-chart]")) {
      if (drawn.has(element)) continue;
      draw(element);
      resized.observe(element);
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...drawn.keys()].forEach(draw));

  // Show an error of a part of the page.
  function note(text) {
    const line = document.getElementById("note");
    line.textContent = text;
    line.hidden = !text;
  }

  // A key presses the element whose `data-key` it is.
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const pressed = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (pressed) {
      event.preventDefault();
      pressed.click();
    }
  });

  function fill(part) {
    times(part);
    charts(part);
  }

  document.addEventListener("htmx:load", (event) => fill(event.detail.elt));
  document.addEventListener("htmx:beforeRequest", (event) => {
    // A live list is not reloaded while somebody uses it, or has selected text in it.
    const list = event.detail.elt;
    if (!list.matches("[data-live]")) return;
    const selection = getSelection();
    const used = list.contains(document.activeElement) || (!selection.isCollapsed && list.contains(selection.anchorNode));
    if (document.hidden || used) event.preventDefault();
  });
  document.addEventListener("htmx:responseError", (event) => {
    // Logged out, or the key was revoked: the page itself says so.
    if (event.detail.xhr.status === 401) location.reload();
    else note(`A part of this page could not be loaded (status ${event.detail.xhr.status}).`);
  });
  document.addEventListener("htmx:sendError", () => note("The console does not answer."));
  document.addEventListener("htmx:afterOnLoad", () => note(""));
  fill(document);
})();

"use strict";
// What is done to every page, and to each part that htmx puts into one.
(() => {
  const zone = new Intl.DateTimeFormat(undefined, {
    year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });

  function times(part) {
    for (const time of part.querySelectorAll("time[datetime]:not([data-local])")) {
      const at = new Date(time.dateTime);
      time.dataset.local = "";
      time.title = time.textContent;
      time.textContent = zone.format(at);
    }
  }

  // `data-plot` holds {time, x: […], series: [{name, values: […]}]}; x is in seconds if it is a time.
  function plots(part) {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    for (const box of part.querySelectorAll(".plot[data-plot]:not([data-drawn])")) {
      box.dataset.drawn = "";
      const { time, x, series } = JSON.parse(box.dataset.plot);
      const size = () => ({ width: Math.max(box.clientWidth, 120), height: 150 });
      const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
      const lines = series.map((one, place) => ({
        label: one.name, stroke: colour(`--c${1 + (place % 6)}`), width: 1.5, points: { size: 4 }, spanGaps: true,
      }));
      const drawn = new uPlot({
        ...size(), scales: { x: { time } }, cursor: { sync: { key: "x" } },
        axes: [axis, { ...axis, size: 56 }], series: [{}, ...lines],
      }, [x, ...series.map((one) => one.values)], box);
      new ResizeObserver(() => drawn.setSize(size())).observe(box);
    }
  }

  function note(text) {
    const line = document.getElementById("note");
    line.textContent = text;
    line.hidden = !text;
  }

  document.addEventListener("htmx:load", (event) => {
    times(event.detail.elt);
    plots(event.detail.elt);
  });
  document.addEventListener("htmx:responseError", (event) => {
    // Logged out, or the key was revoked: the page itself says so.
    if (event.detail.xhr.status === 401) location.reload();
    else note(`A part of this page could not be loaded (status ${event.detail.xhr.status}).`);
  });
  document.addEventListener("htmx:sendError", () => note("The console does not answer."));
  document.addEventListener("htmx:afterOnLoad", () => note(""));
  times(document);
  plots(document);
})();

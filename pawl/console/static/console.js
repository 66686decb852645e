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

  function note(text) {
    const line = document.getElementById("note");
    line.textContent = text;
    line.hidden = !text;
  }

  document.addEventListener("htmx:load", (event) => times(event.detail.elt));
  document.addEventListener("htmx:responseError", (event) => {
    // Logged out, or the key was revoked: the page itself says so.
    if (event.detail.xhr.status === 401) location.reload();
    else note(`A part of this page could not be loaded (status ${event.detail.xhr.status}).`);
  });
  document.addEventListener("htmx:sendError", () => note("The console does not answer."));
  document.addEventListener("htmx:afterOnLoad", () => note(""));
  times(document);
})();

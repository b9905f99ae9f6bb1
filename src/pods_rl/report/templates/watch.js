// Loads a served page again once its server has made a newer one, unless the reader has just used this one.
(() => {
  // seconds since the page was loaded, or since a key, a click or a scroll; a page that waits for runs has no figure
  const QUIET = document.querySelector("figure") ? 10 : 1;
  let used = 0;
  for (const kind of ["pointerdown", "keydown", "wheel", "touchmove"]) addEventListener(kind, () => { used = performance.now(); }, { passive: true });
  const mark = document.createElement("output");
  mark.id = "live";
  document.body.prepend(mark);  // above the page: it covers nothing
  const look = () => {
    const request = new XMLHttpRequest();
    request.open("GET", "/state");
    request.responseType = "json";
    request.onload = () => {
      const state = request.response;
      if (state.version !== Number(document.body.dataset.version)) {
        if (performance.now() - used > 1000 * QUIET) return location.reload();
        mark.textContent = "a newer page follows when you pause";
      } else mark.textContent = state.note || `live: ${state.state} · ${state.age} s old`;
      setTimeout(look, 1000);
    };
    request.onerror = () => {
      mark.textContent = "not live: pods watch has ended";
      setTimeout(look, 1000);
    };
    request.send();
  };
  look();
})();

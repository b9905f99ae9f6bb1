for (const [part, show] of Object.entries(window.pods)) show(JSON.parse(document.getElementById(`${part}-data`).textContent));

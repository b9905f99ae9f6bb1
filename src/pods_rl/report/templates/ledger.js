(() => {
  const at = (id) => document.getElementById(id);
  const groups = [...document.querySelectorAll("details.g")].map((element) => ({
    element,
    head: element.querySelector(".prompt"),
    rollouts: [...element.querySelectorAll("details.r")],
    texts: null,
  }));
  const textsOf = (group) => {
    group.texts ??= [group.head, ...group.rollouts].map((part) => part.textContent.toLowerCase());
    return group.texts;
  };
  const apply = () => {
    const arm = at("f-arm").value, kept = at("f-kept").value, sought = at("f-text").value.trim().toLowerCase();
    const from = Number(at("f-from").value || 0), to = Number(at("f-to").value || Infinity);
    let shownGroups = 0, shownRollouts = 0;
    for (const group of groups) {
      const step = Number(group.element.dataset.step);
      let count = 0;
      if ((arm === "" || group.element.dataset.arm === arm) && step >= from && step <= to) {
        const texts = sought ? textsOf(group) : null;
        const inPrompt = !texts || texts[0].includes(sought);
        group.rollouts.forEach((rollout, index) => {
          const isKept = rollout.classList.contains("k") ? "1" : "0";
          const show = (kept === "" || kept === isKept) && (inPrompt || texts[index + 1].includes(sought));
          rollout.hidden = !show;
          count += show;
        });
      }
      group.element.hidden = count === 0;
      shownGroups += count > 0;
      shownRollouts += count;
    }
    at("f-count").textContent = `${shownGroups} of ${groups.length} groups, ${shownRollouts} rollouts`;
  };
  let timer = 0;
  at("filter").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(apply, 120); });
  at("filter").hidden = false;
  apply();
})();

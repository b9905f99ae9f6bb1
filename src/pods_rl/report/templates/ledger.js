(() => {
  const at = (id) => document.getElementById(id);
  const groups = [...document.querySelectorAll("details.g")].map((element) => ({
    element,
    head: element.querySelector(".prompt"),
    rollouts: [...element.querySelectorAll("details.r")],
    rewards: null,
    texts: null,
  }));
  const textsOf = (group) => {
    group.texts ??= [group.head, ...group.rollouts].map((part) => part.textContent.toLowerCase());
    return group.texts;
  };
  const rewardsOf = (group) => {
    group.rewards ??= group.rollouts.map((rollout) => Number(rollout.querySelector(".n").textContent));
    return group.rewards;
  };
  const number = (id, otherwise) => (at(id).value === "" ? otherwise : Number(at(id).value));
  const apply = () => {
    const arm = at("f-arm").value, run = at("f-run").value, kept = at("f-kept").value;
    const sought = at("f-text").value.trim().toLowerCase();
    const from = number("f-from", -Infinity), to = number("f-to", Infinity);
    const low = number("f-low", -Infinity), high = number("f-high", Infinity);
    const ranged = low > -Infinity || high < Infinity;  // a rollout without a reward is in no range
    let shownGroups = 0, shownRollouts = 0;
    for (const group of groups) {
      const data = group.element.dataset, step = Number(data.step);
      let count = 0;
      if ((arm === "" || data.arm === arm) && (run === "" || data.run === run) && step >= from && step <= to) {
        const texts = sought ? textsOf(group) : null;
        const rewards = ranged ? rewardsOf(group) : null;
        const inPrompt = !texts || texts[0].includes(sought);
        group.rollouts.forEach((rollout, index) => {
          const isKept = rollout.classList.contains("k") ? "1" : "0";
          const inRange = !ranged || (rewards[index] >= low && rewards[index] <= high);
          const show = (kept === "" || kept === isKept) && inRange && (inPrompt || texts[index + 1].includes(sought));
          rollout.hidden = !show;
          count += show;
        });
      }
      group.element.hidden = count === 0;
      shownGroups += count > 0;
      shownRollouts += count;
    }
    at("f-count").textContent = shownGroups
      ? `${shownGroups} of ${groups.length} groups, ${shownRollouts} rollouts`
      : "No rollout matches.";
  };
  let timer = 0;
  const filter = at("filter");
  filter.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(apply, 120); });
  at("f-clear").addEventListener("click", () => {
    for (const field of filter.querySelectorAll("select, input")) field.value = "";
    apply();
  });
  filter.hidden = false;
  apply();
})();

// Sorts a table by the column whose title is clicked; a second click reverses the order.
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("th button.sort");
  if (!button) return;
  const title = button.parentNode, titles = [...title.parentNode.cells], column = titles.indexOf(title);
  const body = title.closest("table").tBodies[0], isText = title.classList.contains("text");
  const falls = title.getAttribute("aria-sort") === "ascending";
  const text = (row) => row.cells[column].textContent.trim();
  const number = (row) => parseFloat(text(row).replace(/^>\s*/, ""));
  const compare = (a, b) => {
    if (isText) return text(a).localeCompare(text(b), "en", { numeric: true }) * (falls ? -1 : 1);
    const [left, right] = [number(a), number(b)];
    if (isNaN(left) || isNaN(right)) return isNaN(left) - isNaN(right);  // no number: at the end in both orders
    return (left - right) * (falls ? -1 : 1);
  };
  body.append(...[...body.rows].sort(compare));
  for (const other of titles) other.removeAttribute("aria-sort");
  title.setAttribute("aria-sort", falls ? "descending" : "ascending");
});

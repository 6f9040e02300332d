// Quarto's callouts open by mouse alone, and its search has no name
document.querySelectorAll('.callout-header[data-bs-toggle]').forEach(e => {
  e.setAttribute('role', 'button');
  e.tabIndex = 0;
  e.removeAttribute('aria-label');
});
document.addEventListener('keydown', e => {
  if (!['Enter', ' '].includes(e.key) || !e.target.matches('.callout-header[role=button]')) return;
  e.preventDefault();
  e.target.click();
});
function nameSearch() {                                     // it is drawn late, and again
  for (const s of ['.aa-DetachedSearchButton', '.aa-Autocomplete', '#quarto-search input'])
    document.querySelectorAll(s).forEach(e => e.setAttribute('aria-label', 'Search'));
  document.querySelector('#quarto-search')?.removeAttribute('aria-label');
}
nameSearch();
const search = document.querySelector('#quarto-search');
if (search) new MutationObserver(nameSearch).observe(search, { childList: true, subtree: true });
// what scrolls can be scrolled by keys, also in a callout that opens later
function reachScrolling() {
  for (const e of document.querySelectorAll('main *'))
    if (e.scrollWidth > e.clientWidth && /auto|scroll/.test(getComputedStyle(e).overflowX)) e.tabIndex = 0;
}
reachScrolling();
document.addEventListener('shown.bs.collapse', reachScrolling);
document.addEventListener('toggle', reachScrolling, true);
document.addEventListener('input', reachScrolling);

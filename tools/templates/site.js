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
for (const s of ['.aa-DetachedSearchButton', '.aa-Autocomplete', '#quarto-search'])
  document.querySelectorAll(s).forEach(e => e.setAttribute('aria-label', 'Search'));

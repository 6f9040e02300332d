// Frames that were computed beforehand, swapped by native controls in a page without a kernel.
//   data = {values: [the texts of each control], frames: [HTML], index: [the frame of each combination]}

/** `root` holds the controls (`[data-k]`, whose value is a position), an `<output>` behind each, and `.mp-frame`. */
export function mount(root, data) {
  const controls = [...root.querySelectorAll('[data-k]')];
  const frame = root.querySelector('.mp-frame');

  function show() {
    let combination = 0;
    controls.forEach((control, i) => {
      const values = data.values[i];
      combination = combination * values.length + Number(control.value);
      control.nextElementSibling.textContent = control.tagName === 'INPUT' ? values[control.value] : '';
    });
    frame.innerHTML = data.frames[data.index[combination]];
  }

  for (const control of controls) control.addEventListener('input', show);
  show();
}

'use strict';
// Values under the pointer, and a slider through the samples: the page is whole without either.

function readChart(chart) {
  const [left, right, bottom, top] = chart.dataset.box.split(' ').map(Number);
  const [low, high, least, most] = chart.dataset.ends.split(' ').map(Number);
  const lines = [...chart.querySelectorAll('polyline')].map(line => ({
    name: line.dataset.name,
    points: line.getAttribute('points').split(' ').map(point => point.split(',').map(Number)),
  }));
  const x = pixel => low + (pixel - left) / (right - left) * (high - low);
  const y = pixel => least + (pixel - bottom) / (top - bottom) * (most - least);
  return {lines, left, right, top, bottom, x, y};
}

function told(value) {
  return Number(value.toPrecision(3)).toString().replace('-', '−');
}

function follow(chart) {
  const {lines, left, right, top, bottom, x, y} = readChart(chart);
  if (!lines.length) return;
  const output = chart.parentElement.querySelector('.at');
  const cursor = document.createElementNS(chart.namespaceURI, 'line');
  cursor.setAttribute('class', 'cursor');
  cursor.setAttribute('y1', top);
  cursor.setAttribute('y2', bottom);
  output.hidden = false;
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const pixel = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    if (pixel < left || pixel > right) return;
    const nearest = lines.map(line => ({
      name: line.name,
      point: line.points.reduce((a, b) => Math.abs(b[0] - pixel) < Math.abs(a[0] - pixel) ? b : a),
    }));
    const at = nearest[0].point[0];
    cursor.setAttribute('x1', at);
    cursor.setAttribute('x2', at);
    chart.append(cursor);
    output.textContent = `at ${told(x(at))}: ` +
      nearest.map(each => `${each.name} ${told(y(each.point[1]))}`).join(', ');
  });
  chart.addEventListener('pointerleave', () => {
    cursor.remove();
    output.textContent = '';
  });
}

function slide(section) {
  const samples = [...section.querySelectorAll('.sample')].filter(each => each.querySelector('.all'));
  if (!samples.length) return;
  const steps = samples.map(each => each.querySelectorAll('.all .answer').length);
  const label = document.createElement('label');
  label.className = 'slider';
  const input = document.createElement('input');
  input.type = 'range';
  input.min = 0;
  input.max = Math.max(...steps) - 1;
  input.value = Math.floor(Math.max(...steps) / 2);
  const shown = document.createElement('span');
  const show = () => {
    for (const sample of samples) {
      const all = sample.querySelectorAll('.all .answer');
      const chosen = all[Math.min(input.value, all.length - 1)];
      const place = sample.querySelectorAll('.answers .answer')[1];
      place.replaceChildren(...chosen.cloneNode(true).childNodes);
      shown.textContent = chosen.querySelector('.when').textContent;
    }
  };
  input.addEventListener('input', show);
  label.append('On the way:', input, shown);
  section.querySelector('p').after(label);
  show();
}

document.querySelectorAll('.chart').forEach(follow);
document.querySelectorAll('section').forEach(slide);

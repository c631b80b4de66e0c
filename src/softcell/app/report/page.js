'use strict';
(() => {
  const all = (root, what) => Array.from(root.querySelectorAll(what));
  const store = {  // a page opened from a file may have no storage
    get(key) { try { return localStorage.getItem(key); } catch { return null; } },
    set(key, value) { try { localStorage.setItem(key, value); } catch { /* not kept */ } },
  };

  const THEMES = ['auto', 'light', 'dark'];
  function theme(name) {
    if (name === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    document.querySelector('button.theme').textContent = `theme: ${name}`;
    store.set('softcell-theme', name);
  }
  const kept = store.get('softcell-theme');
  theme(THEMES.includes(kept) ? kept : 'auto');
  document.querySelector('button.theme').addEventListener('click', () => {
    const now = document.documentElement.dataset.theme || 'auto';
    theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });

  function weights(box) {
    const epochs = JSON.parse(box.dataset.epochs);
    const slider = box.querySelector('.epochs'), shown = box.querySelector('output'), play = box.querySelector('.play');
    const tables = all(box, 'figure').map((figure) => ({
      cells: all(figure, 'td[data-i]'),
      top: Number(figure.dataset.top),
      frames: JSON.parse(figure.dataset.frames),
      picked: JSON.parse(figure.dataset.picked).map((list) => new Set(list)),
    }));
    let timer = null;
    const show = () => {
      const at = Number(slider.value);
      shown.textContent = `epoch ${epochs[at]}`;
      slider.setAttribute('aria-valuetext', shown.textContent);
      for (const table of tables) {
        for (const cell of table.cells) {
          const i = Number(cell.dataset.i), value = table.frames[at][i];
          cell.textContent = (value / 100).toFixed(2);
          cell.className = `h${Math.min(9, Math.floor(value * 10 / table.top))}${table.picked[at].has(i) ? ' picked' : ''}`;
        }
      }
    };
    const stop = () => { clearInterval(timer); timer = null; play.textContent = '▶ play'; };
    slider.addEventListener('input', () => { stop(); show(); });
    play.addEventListener('click', () => {
      if (timer !== null) { stop(); return; }
      if (Number(slider.value) === epochs.length - 1) slider.value = 0;
      show();
      play.textContent = '❚❚ stop';
      timer = setInterval(() => {
        if (!box.isConnected || Number(slider.value) >= epochs.length - 1) { stop(); return; }
        slider.value = Number(slider.value) + 1;
        show();
      }, Math.max(60, Math.min(500, 8000 / epochs.length)));
    });
    box.showFrame = (at) => { slider.value = at; show(); };
  }

  function plot(figure) {
    const spread = JSON.parse(figure.dataset.spread), values = JSON.parse(figure.dataset.values);
    const picture = figure.querySelector('svg.chart'), cursor = figure.querySelector('.cursor');
    const readout = figure.querySelector('.readout'), numbers = all(figure, '.legend b');
    const last = numbers.map((b) => b.textContent);
    let at = spread.e.length - 1;
    const show = () => {
      figure.classList.add('reading');
      cursor.setAttribute('transform', `translate(${spread.x[at]} 0)`);
      readout.textContent = `epoch ${spread.e[at]}`;
      numbers.forEach((b, i) => { b.textContent = values[i][spread.e[at]] ?? '–'; });
    };
    const leave = () => {
      figure.classList.remove('reading');
      readout.textContent = 'at the end';
      numbers.forEach((b, i) => { b.textContent = last[i]; });
      at = spread.e.length - 1;
    };
    const follow = (event) => {
      const box = picture.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width;
      at = spread.x.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(spread.x[best] - x) ? i : best), 0);
      show();
    };
    picture.addEventListener('pointermove', follow);
    picture.addEventListener('pointerdown', follow);
    picture.addEventListener('pointerleave', leave);
    figure.addEventListener('blur', leave);
    figure.addEventListener('keydown', (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      at = Math.max(0, Math.min(spread.e.length - 1, at + step));
      show();
    });
  }

  function choose(root, id) {
    const known = all(root, '.run');
    const wanted = known.find((run) => run.id === id) || known[0];
    for (const run of known) run.classList.toggle('chosen', run === wanted);
    const chooser = root.querySelector('.chooser');
    if (chooser && wanted) chooser.value = wanted.id;
  }

  function prepare(root) {
    all(root, '.weights').forEach(weights);
    all(root, '.plot').forEach(plot);
    for (const box of all(root, '.mistakes')) {
      const check = box.querySelector('.cams');
      if (check) check.addEventListener('change', () => box.classList.toggle('cams-on', check.checked));
      else box.classList.remove('cams-on');
    }
    for (const button of all(root, '.copy')) {
      button.addEventListener('click', async () => {
        const code = button.parentElement.querySelector('code');
        try {
          await navigator.clipboard.writeText(code.textContent);
          button.textContent = 'copied';
        } catch {  // without permission the text is selected instead
          getSelection().selectAllChildren(code);
          button.textContent = 'selected';
        }
        setTimeout(() => { button.textContent = 'copy'; }, 1500);
      });
    }
    if (root.classList.contains('several')) {
      root.classList.add('scripted');
      choose(root, location.hash.slice(1).split('-').slice(0, 2).join('-'));
      root.querySelector('.chooser').addEventListener('change', (event) => {
        choose(root, event.target.value);
        history.replaceState(null, '', `#${event.target.value}`);
      });
    }
  }

  const main = () => document.querySelector('main');
  prepare(main());
  addEventListener('hashchange', () => {
    const id = location.hash.slice(1);
    if (!/^run-\d+/.test(id) || !main().classList.contains('several')) return;
    choose(main(), id.split('-').slice(0, 2).join('-'));
    document.getElementById(id)?.scrollIntoView();
  });

  // A served page refreshes itself and keeps the reader's choices.
  const every = Number(document.body.dataset.live);
  if (!every) return;
  const state = document.querySelector('.state');
  let tag = null;
  function refresh(text) {
    const fresh = new DOMParser().parseFromString(text, 'text/html').querySelector('main');
    if (!fresh) return;
    const old = main();
    const sliders = all(old, '.weights').map((box) => {
      const input = box.querySelector('.epochs');
      return [box.closest('.run').id, input.value === input.max ? null : Number(input.value)];
    });
    const open = all(old, 'details').map((details) => details.open);
    const chosen = old.querySelector('.run.chosen')?.id;
    const scrolled = scrollY;
    old.replaceWith(fresh);
    prepare(fresh);
    if (chosen && fresh.classList.contains('several')) choose(fresh, chosen);
    for (const [id, at] of sliders) {
      if (at !== null) fresh.querySelector(`#${id} .weights`)?.showFrame?.(at);
    }
    all(fresh, 'details').forEach((details, i) => { details.open = Boolean(open[i]); });
    scrollTo(0, scrolled);
  }
  async function poll() {
    try {
      const answer = await fetch('/', { headers: tag ? { 'If-None-Match': tag } : {}, cache: 'no-store' });
      if (answer.status === 200) {
        const text = await answer.text();
        if (tag !== null && tag !== answer.headers.get('ETag')) refresh(text);
        tag = answer.headers.get('ETag');
      } else if (answer.status !== 304) {
        throw new Error(String(answer.status));
      }
      state.textContent = 'live';
    } catch {
      state.textContent = 'no answer: is softcell watch still running?';
    }
    setTimeout(poll, every * 1000);
  }
  poll();
})();

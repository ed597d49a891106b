"""Looks of a page in Chromium, see browser.Window: whether all of it can be read."""

import base64

# Lists text whose contrast with what is behind it is below 4.5, or 3 for large text (WCAG 2, AA).
_WEAK_TEXT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map(value => value / 255);
  };
  const over = (top, below) => below.slice(0, 3).map(
    (value, i) => top[3] * top[i] + (1 - top[3]) * value);
  const light = colour => [.2126, .7152, .0722].reduce((sum, share, i) => sum + share * (
    colour[i] <= .04045 ? colour[i] / 12.92 : ((colour[i] + .055) / 1.055) ** 2.4), 0);
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'Canvas';  // as the colour scheme has it
  const paper = rgba(getComputedStyle(probe).color);
  probe.remove();
  const backgroundOf = element => {
    const above = [];
    for (let each = element; each; each = each.parentElement) above.unshift(each);
    return above.reduce(
      (below, each) => over(rgba(getComputedStyle(each).backgroundColor), below), paper);
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.checkVisibility() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const behind = backgroundOf(element);
    const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
    for (let each = element; each; each = each.parentElement)
      ink[3] *= getComputedStyle(each).opacity;
    const lights = [light(over(ink, behind)), light(behind)].sort((a, b) => a - b);
    const contrast = (lights[1] + .05) / (lights[0] + .05);
    const isLarge = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    if (contrast < (isLarge ? 3 : 4.5))
      found.push(`${element.tagName} ${text.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return found;
})()"""
# Lists what sticks out of the window to the right, unless it is in something that can be scrolled.
_OVERFLOW = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = each => each && (/auto|scroll|hidden|clip/.test(getComputedStyle(each).overflowX)
    && each !== document.body || scrolls(each.parentElement));
  const found = [...document.body.querySelectorAll('*')].filter(
    each => each.checkVisibility() && each.getBoundingClientRect().right > width + 1
      && !scrolls(each.parentElement));
  const page = document.documentElement.scrollWidth;
  return [...(page > width ? [`the page is ${page} wide`] : []),
    ...found.map(each => `${each.tagName} ${each.textContent.trim().slice(0, 40)}`)];
})()"""
# Lists what can be scrolled, but not with the keyboard, or has no name that is read out.
_UNREACHABLE = """(() => [...document.body.querySelectorAll('*')].filter(
  each => each.checkVisibility() && each.scrollWidth > each.clientWidth + 1
    && /auto|scroll/.test(getComputedStyle(each).overflowX)
    && !(each.tabIndex === 0 && (each.ariaLabel || each.getAttribute('aria-labelledby')))
  ).map(each => `${each.tagName} ${each.textContent.trim().slice(0, 40)}`))()"""
# Whether what has the focus can be seen to have it.
_SHOWS_FOCUS = """(() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0
    || style.boxShadow !== 'none';
})()"""


def weak_texts(window):
    """Texts of the page that hardly differ from what is behind them."""
    return window.script(_WEAK_TEXT)


def sticking_out(window):
    """Return the elements that make the page wider than the window."""
    return window.script(_OVERFLOW)


def unreachable(window):
    """Return the elements that the keyboard cannot scroll."""
    return window.script(_UNREACHABLE)


def focused(window, most=300):
    found, hidden = {}, []
    window.script('document.activeElement.blur()')
    for _ in range(most):
        window.press('\ue004')
        place, name = window.script(
            "[[...document.querySelectorAll('*')].indexOf(document.activeElement),"
            ' `${document.activeElement.tagName}'
            ' ${document.activeElement.textContent.trim().slice(0, 30)}`]'
        )
        if place in found or name.startswith('BODY '):
            break
        found[place] = name
        if not window.script(_SHOWS_FOCUS):
            hidden.append(name)
    return list(found.values()), hidden


def printed(window):
    settings = {'paperWidth': 8.27, 'paperHeight': 11.69, 'printBackground': True}
    return base64.b64decode(window.driver.execute_cdp_cmd('Page.printToPDF', settings)['data'])


def emulate_paper(window, scheme):
    """Show the page as it would be printed by somebody who likes that colour scheme."""
    features = [{'name': 'prefers-color-scheme', 'value': scheme}]
    window.driver.execute_cdp_cmd(
        'Emulation.setEmulatedMedia', {'media': 'print', 'features': features}
    )


def unnamed(window):
    """Roles of what the screen reader would read without a name: pictures, tables, controls."""
    nodes = window.driver.execute_cdp_cmd('Accessibility.getFullAXTree', {})['nodes']
    roles = 'image img table button link slider checkbox combobox textbox heading region'.split()
    found = []
    for node in nodes:
        role, name = (node.get(each, {}).get('value') for each in ('role', 'name'))
        if not node['ignored'] and role in roles and not name:
            found.append(role)
    return found

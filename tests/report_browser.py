#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens a report of `rafter bench --html` in headless Chromium and checks it: report_browser.py REPORT.html REPORT.json

Speaks the DevTools protocol over a pipe, so nothing but the browser is needed. Exit status 77 where there is none.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

PHONE_WIDTH = 360


class Browser:
    """One page of a browser that was started for this."""

    def __init__(self, program, profile):
        to_browser, self.orders = os.pipe()
        self.events, from_browser = os.pipe()

        def descriptors():  # the browser reads 3 and writes 4
            os.dup2(to_browser, 100)
            os.dup2(from_browser, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        self.process = subprocess.Popen([program, *arguments, f"--user-data-dir={profile}"], close_fds=False,
                                        preexec_fn=descriptors, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session, self.errors, self.loaded = b"", 0, None, [], False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Accessibility"):
            self.send(domain + ".enable")

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.events, 1 << 16)
            if not piece:
                sys.exit("the browser is gone")
            self.buffer += piece
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        self.loaded |= method == "Page.loadEventFired"
        return message

    def send(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.orders, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        self.send("Page.navigate", url=url)
        while not self.loaded:
            self.receive()

    def ask(self, expression):
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point(self, x, y, expression):
        """Moves the pointer; returns whether the expression becomes true. A page that was just opened may not listen yet."""
        for attempt in range(40):
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + attempt % 2, y=y)
            if self.ask(expression):
                return True
            time.sleep(0.05)
        return False

    def close(self):
        self.process.kill()
        self.process.wait()


# Text with too little contrast to its background, by WCAG's formula: text of this size needs 4.5.
CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { const tile = e.closest('.tile rect, .tile text')?.parentElement.querySelector('rect');
                        if (tile) return getComputedStyle(tile).fill;
                        for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                          if (!/, 0\\)$/.test(c) && c !== 'transparent') return c; } return 'rgb(255,255,255)'; };
  const bad = new Set();
  for (const e of document.querySelectorAll('body *')) {
    if (!e.textContent.trim() || e.closest('script,style,#tip') || e.children.length && e.tagName !== 'text') continue;
    const s = getComputedStyle(e), a = light(e.tagName === 'text' ? s.fill : s.color), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.add(`${e.tagName}.${e.className.baseVal ?? e.className} ${ratio.toFixed(2)}`);
  }
  return [...bad];
})()"""

STRUCTURE = """(() => {
  const bad = [];
  const want = (good, what) => { if (!good) bad.push(what); };
  want(document.documentElement.lang === 'en', 'no language');
  want(document.title.startsWith('Rafter'), 'no title');
  want(document.querySelectorAll('h1').length === 1, 'not one h1');
  want(document.querySelectorAll('main').length === 1, 'not one main');
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
  want(new Set(ids).size === ids.length, 'an id is there twice');
  for (const a of document.querySelectorAll('a')) want(document.getElementById(decodeURIComponent(a.hash.slice(1))), 'dead link ' + a.hash);
  for (const t of document.querySelectorAll('table')) want(t.caption && t.querySelector('thead th[scope=col]'), 'a table without caption or headings');
  for (const s of document.querySelectorAll('svg')) want(s.getAttribute('role') === 'img' && s.getAttribute('aria-label'), 'an unnamed picture');
  for (const e of document.querySelectorAll('section[data-op]')) {
    const name = e.querySelector('h2').textContent, title = e.getAttribute('aria-labelledby');
    want(name !== title && !/[a-z]-[a-z]/.test(name.replace('LRPE-cosine', '')), 'a title that is not plain: ' + name);
    want(e.querySelector('.slug').textContent === title, 'no slug of ' + title);
  }
  for (const e of document.querySelectorAll('thead th')) want(getComputedStyle(e).position === 'sticky', 'a heading that scrolls away');
  want(!/[0-9]{3}\\.[0-9]+×/.test(document.body.innerText), 'an absurd factor');
  for (const e of document.querySelectorAll('[src],link[href]')) want((e.src ?? e.href).startsWith('data:'), 'something from elsewhere');
  return bad;
})()"""


def is_shown(row, maps, floors, first):
    """Whether a row of the report is a point of its table's plot, the first or the one with logarithmic axes, or in a heat map."""
    measured = row["median"] is not None and not row.get("wrong")
    if row["table"] in maps:
        return measured and row["provider"] == "rafter" and first
    if row["metric"] == "memory" and first:
        return measured
    # without a floor, the first plot shows time over that of the best other library
    return measured and row["median"] > 0 and (not first or row["table"] not in floors or row.get("share", 0) > 0)


def check_points(page, report):
    """Every cell is a point of both plots, or is in a tile of the first group of a heat map."""
    maps = {table["title"] for table in report["tables"] if "map" in table}
    floors = {row["table"] for row in report["rows"] if row.get("share", 0) > 0}
    for first, plot in ((True, "figure"), (False, "details.log")):
        wanted = {table["title"]: 0 for table in report["tables"]}
        for row in report["rows"]:
            wanted[row["table"]] += is_shown(row, maps, floors, first)
        assert sum(wanted.values()) > 0 or (maps and not first), "the report has nothing to draw"
        drawn = page.ask("Object.fromEntries([...document.querySelectorAll('section[data-op]')].map("
                         f"s => [s.getAttribute('aria-labelledby'), (s.querySelector('{plot}')?.querySelectorAll('circle.p').length ?? 0) + "
                         f"[...(s.querySelector('{plot}')?.querySelectorAll('.tile[data-group=\"0\"]') ?? [])]"
                         ".reduce((n, t) => n + Number(t.dataset.cells), 0)]))")
        assert drawn == wanted, [(title, drawn.get(title), count) for title, count in wanted.items() if drawn.get(title) != count]


def check_filter(page, report):
    """Contents and filter: an entry for each table; the choice of an op and a direction hides the others."""
    visible = "[...document.querySelectorAll('section[data-op]')].filter(s => !s.hidden)"
    everything = len(report["tables"])
    assert page.ask("document.querySelectorAll('nav li a').length") == everything, "the contents do not have every table"
    assert page.ask(visible + ".length") == everything, "something is hidden before a choice"
    choose = ("(() => { const s = document.querySelector('.filter select[name=%s]'); s.selectedIndex = %d;"
              "s.dispatchEvent(new Event('change')); return s.value; })()")
    op, mode = page.ask(choose % ("op", 1)), page.ask(choose % ("mode", 1))
    keys = page.ask(visible + ".map(s => [s.dataset.op, s.dataset.mode])")
    assert keys and all(key == [op, mode] for key in keys), (op, mode, keys)
    entries = page.ask("[...document.querySelectorAll('nav li')].filter(e => !e.hidden).length")
    assert entries == len(keys), f"{entries} entries of the contents for {len(keys)} tables"
    assert page.ask("document.getElementById('shown').textContent").split()[0] == str(len(keys))
    page.ask(choose % ("op", 0)), page.ask(choose % ("mode", 0))
    assert page.ask(visible + ".length") == everything


def check_hover(page):
    # A point that no other one covers.
    middle = page.ask("(() => { const all = [...document.querySelectorAll('circle.p')].map(p => [p, p.getBoundingClientRect()]);"
                      "const near = (a, b) => Math.hypot(a.x - b.x, a.y - b.y) < 12;"
                      "const p = all.find(([p, a]) => all.every(([q, b]) => p === q || !near(a, b)))[0];"
                      "p.scrollIntoView({block: 'center'});"
                      "const b = p.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2, p.dataset.v]; })()")
    assert page.ask("document.getElementById('tip').hidden"), "a value is shown before the pointer is there"
    assert page.point(middle[0] + 2, middle[1] + 1, "!document.getElementById('tip').hidden"), "no value is shown under the pointer"
    shown = page.ask("document.getElementById('tip').textContent")
    assert shown == middle[2] and " = " in shown, f"'{shown}' is shown, wanted '{middle[2]}'"
    assert page.point(1, 1, "document.getElementById('tip').hidden"), "the value stays when the pointer has left"


def check_media(page):
    light = page.ask("getComputedStyle(document.body).backgroundColor")
    assert not page.ask(CONTRAST), page.ask(CONTRAST)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.ask("getComputedStyle(document.body).backgroundColor") != light, "there is no dark mode"
    assert not page.ask(CONTRAST), page.ask(CONTRAST)
    page.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert not page.ask(CONTRAST), page.ask(CONTRAST)
    page.send("Emulation.setEmulatedMedia", media="", features=[])
    page.send("Emulation.setDeviceMetricsOverride", width=PHONE_WIDTH, height=740, deviceScaleFactor=2, mobile=True)
    width = page.ask("document.scrollingElement.scrollWidth")
    assert width <= PHONE_WIDTH, f"the page is {width} wide on a phone of {PHONE_WIDTH}"
    small = page.ask("[...document.querySelectorAll('figure svg')].filter(s => s.querySelector('circle.p') && s.clientWidth).map("
                     "s => parseFloat(getComputedStyle(s.querySelector('text')).fontSize) * s.clientWidth / s.viewBox.baseVal.width)")
    assert all(size >= 9 for size in small), f"texts of {min(small)} pixels in a plot on a phone"
    silent = page.ask("[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth + 2 && "
                      "!b.previousElementSibling.offsetHeight).length")
    assert silent == 0, f"{silent} tables are cut without a hint"


def check_names(page):
    """What a screen reader gets: every picture, link, region and table has a name."""
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in ("image", "img", "link", "region", "table", "heading") and not node.get("ignored"):
            assert node.get("name", {}).get("value"), f"a {role} without a name"


def main():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        print("no Chromium here")
        sys.exit(77)
    with open(sys.argv[2], encoding="utf-8") as file:
        report = json.load(file)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Browser(program, profile)
        try:
            page.open("file://" + os.path.abspath(sys.argv[1]))
            assert not page.ask(STRUCTURE), page.ask(STRUCTURE)
            if page.ask("Boolean(document.querySelector('nav'))"):  # a comparison has none, and two plots of each table
                check_points(page, report)
                check_filter(page, report)
            if page.ask("document.querySelectorAll('circle.p').length"):
                check_hover(page)
            check_names(page)
            check_media(page)
            assert not page.errors, page.errors
        finally:
            page.close()
    print("the report looks as it should")


if __name__ == "__main__":
    main()

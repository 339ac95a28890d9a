// Whether the theme is dark. Told by its words, which are light then: front ends differ in when they give the page a class for it.

const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true })
const HALF = 3 * 128 // of red, green and blue together

let seen, dark

/** Asked anew each time: a user may change the theme. */
export function isDark() {
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--fg-color")
    if (ink !== seen) {
        pen.fillStyle = seen = ink
        pen.fillRect(0, 0, 1, 1)
        const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data
        dark = red + green + blue > HALF
    }
    return dark
}

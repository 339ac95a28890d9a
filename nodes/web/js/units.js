// Bytes and times as people read them.

export const gib = bytes => (bytes >= 0.1 * 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`)

export const duration = seconds => (seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`)

/** Of a few GiB a digit behind the point, without the unit; of less as many as tell something. */
export const inGib = bytes => (bytes / 2 ** 30).toFixed(bytes >= 0.1 * 2 ** 30 || !bytes ? 1 : 3)

/** Of what is left as much as matters: hours and minutes, or minutes, or seconds. */
export function shortTime(seconds) {
    if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`
    const minutes = Math.round(seconds / 60)
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`
}

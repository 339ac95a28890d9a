// Room for nodes that have grown: what is below them, and would be covered now, moves down. Groups keep their members.

const TITLE = 30 // the height of a node's title, which lies above its place
const GAP = 20 // between two that were farther apart

/** heights: those of the grown nodes, by node; their places and sizes are of a saved graph, and are written into it. */
export function makeRoom({ nodes, groups = [] }, heights) {
    const boxes = [...nodes.map(node => nodeBox(node, heights.get(node))), ...groups.map(groupBox)]
    for (const box of boxes) {
        if (box.group) box.members = boxes.filter(other => other !== box && contains(box, other))
    }
    const above = boxes.map(box => boxes.filter(other => box.left < other.right && other.left < box.right && other.bottom <= box.top))
    let moved = true
    while (moved) {
        moved = false
        boxes.forEach((box, i) => {
            for (const other of above[i]) moved = push(box, other) || moved
            for (const member of box.members ?? []) {
                moved = shift(member, box.shift) || moved
                const grown = member.shift + member.grown - box.shift
                if (grown > box.grown) [box.grown, moved] = [grown, true]
            }
        })
    }
    for (const box of boxes) box.write()
}

function nodeBox(node, height = node.size[1]) {
    const { pos: [left, y], size, flags } = node
    const shown = flags?.collapsed ? 0 : size[1], grown = flags?.collapsed ? 0 : Math.max(0, height - size[1])
    const box = { left, right: left + size[0], top: y - TITLE, bottom: y + shown, grown, shift: 0, fixed: flags?.pinned }
    box.write = () => {
        node.pos = [left, y + box.shift]
        node.size = [size[0], Math.max(size[1], height)]
    }
    return box
}

function groupBox(group) {
    const [left, top, width, height] = group.bounding
    const box = { left, right: left + width, top, bottom: top + height, grown: 0, shift: 0, group, fixed: group.flags?.pinned }
    box.write = () => { group.bounding = [left, top + box.shift, width, height + box.grown] }
    return box
}

/** As the front end has it: a group's members are those whose middle is in it. */
function contains(group, { left, right, top, bottom }) {
    const x = (left + right) / 2, y = (top + bottom) / 2
    const isSmaller = right - left < group.right - group.left && bottom - top < group.bottom - group.top
    return isSmaller && group.left <= x && x < group.right && group.top <= y && y < group.bottom
}

/** Move a box down to where the one above it ends now, as far from it as before or by a gap. Whether it moved. */
function push(box, above) {
    if (!above.grown && !above.shift) return false
    return shift(box, above.bottom + above.shift + above.grown + Math.min(GAP, box.top - above.bottom) - box.top)
}

function shift(box, by) {
    if (by <= box.shift || box.fixed) return false
    box.shift = by
    return true
}
